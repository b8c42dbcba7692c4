// All answers to one prompt, step by step; of several runs side by side.
"use strict";

(() => {
  const { el, ask } = plaudit;

  const column = async (run, prompt) => {
    const made = el("div", {}, el("h3", {}, plaudit.shown().length > 1 ? plaudit.swatch(run) : null, run));
    let found = await ask("answers", { run, prompt, sort: "step", count: 60 });
    while (found && found.indexed < 1 && found.rows.length < 60) {
      plaudit.tell(`${Math.floor(100 * found.indexed)} % of the answers of ${run} are indexed so far.`);
      await new Promise((done) => setTimeout(done, 500));
      found = await ask("answers", { run, prompt, sort: "step", count: 60 });
    }
    plaudit.tell("");
    if (found && found.total > found.rows.length) made.append(el("p", { className: "quiet" }, `The latest ${found.rows.length} of ${found.total} answers`));
    if (!found || !found.rows.length) made.append(el("p", {}, "This run has no recorded answer to this prompt."));
    let step = "";
    for (const row of found?.rows ?? []) {
      const name = `Step ${row.step}${row.kind === "train" ? "" : ` (${row.kind})`}`;
      if (name !== step) made.append(el("h4", {}, name));
      step = name;
      made.append(el("button", { className: "answer", onclick: () => plaudit.showAnswer(run, row.at).catch((e) => plaudit.tell(e.message)) },
        plaudit.facts(row), plaudit.said(row)));
    }
    return [made, found?.rows[0]];
  };

  plaudit.views.pairs = {
    title: "One prompt",
    async show(into) {
      const mine = ++plaudit.turn;
      const names = plaudit.shown();
      const [run] = names;
      const latest = await ask("steps", { run });
      const last = latest?.step[latest.step.length - 1];
      const near = last === undefined ? null : await ask("answers", { run, step: last, count: 200 });
      const known = new Map((near?.rows ?? []).map((row) => [row.prompt_id, row.prompt]));
      const prompt = plaudit.state.prompt ?? known.keys().next().value;
      if (prompt === undefined) {
        into.replaceChildren(el("p", {}, "This run has no recorded answers."));
        return;
      }
      if (!known.has(prompt)) known.set(prompt, prompt);
      const choices = [...known].map(([id, text]) => [id, `${text.replace(/\s+/g, " ").slice(0, 70)} (${id.slice(-30)})`]);
      const columns = await Promise.all(names.map((name) => column(name, prompt)));
      if (mine !== plaudit.turn) return;
      const of = (name) => columns.map(([, row]) => row?.[name]).find(Boolean);
      into.replaceChildren(
        el("div", { className: "row" }, plaudit.select("Prompt", choices, prompt, (value) => { plaudit.go({ prompt: value }); this.show(into); })),
        el("div", { className: "prompt" }, el("div", { className: "quiet" }, prompt), el("div", { className: "text", tabIndex: 0 }, of("prompt") ?? ""),
          plaudit.reference({ answer: of("answer") }, { tabIndex: 0 })),
        names.length > 1 ? "" : el("p", { className: "quiet" }, "Compare with another run to see its answers beside these."),
        el("div", names.length > 1 ? { className: "two", tabIndex: 0, role: "region", "aria-label": "Answers of each run" } : {}, columns.map(([made]) => made)));
    },
  };
})();
