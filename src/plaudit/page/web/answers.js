// Answers by prompt: a slider over steps, search, sort and limits by part, reward, length, version.
"use strict";

(() => {
  const { el, ask, number } = plaudit;
  const KINDS = [["", "all"], ["train", "trained on"], ["validation", "validation"], ["dropped", "dropped"]];
  const ENDS = [["", "all"], ["eos", "ended"], ["stop", "stop string"], ["length", "cut off"], ["turns", "out of turns"]];
  const PLAIN = ["reward", "advantage", "length", "version", "step"];
  const ASKED = ["kind", "finish", "words", "field", "least", "most", "sort", "order"];
  let asked = 0;
  let parts = [];
  let steps = { step: [], answers: [], groups: [], of: [] };

  const fields = () => [...PLAIN.map((name) => [name, name]), ...parts.map((name) => [`part:${name}`, `part: ${name}`])];

  const nearest = (wanted) => {
    const place = steps.step.findIndex((step) => step >= wanted);
    return place < 0 ? steps.step.length - 1 : place;
  };

  const given = () => {
    const { run, every, step } = plaudit.state;
    const found = { run, count: 50 };
    ASKED.forEach((name) => { found[name] = plaudit.state[name]; });
    if (!every && steps.step.length) found.step = steps.step[step === undefined ? steps.step.length - 1 : nearest(Number(step))];
    if (!found.field || !(found.least || found.most)) ["field", "least", "most"].forEach((name) => delete found[name]);
    return found;
  };

  const head = (row) => el("div", { className: "prompt" },
    el("div", { className: "head" },
      el("h3", {}, `Step ${row.step}, prompt ${row.group}${row.kind === "train" ? "" : ` (${row.kind})`}`),
      el("button", { onclick: () => { plaudit.go({ tab: "pairs", prompt: row.prompt_id }); plaudit.render(); } }, "All answers to it")),
    el("div", { className: "quiet" }, row.prompt_id), el("div", { className: "text", tabIndex: 0 }, row.prompt),
    plaudit.reference(row, { tabIndex: 0 }));

  const card = (row) => el("button", { className: "answer", onclick: () => plaudit.showAnswer(plaudit.state.run, row.at).catch((e) => plaudit.tell(e.message)) },
    plaudit.facts(row), plaudit.said(row));

  plaudit.answerList = (rows, before = null) => {
    const made = [];
    let last = before;
    for (const row of rows) {
      const group = `${row.step}/${row.kind}/${row.group}`;
      if (group !== last) made.push(head(row));
      last = group;
      made.push(card(row));
    }
    return [made, last];
  };

  const look = async (list, count, more) => {
    const mine = ++asked;
    const question = given();
    let shown = 0;
    let last = null;
    const further = async () => {
      const found = await ask("answers", { ...question, offset: shown || undefined });
      if (mine !== asked || !found) return;
      if (!shown) list.replaceChildren();
      if (found.parts.join() !== parts.join() && found.parts.length) {
        parts = found.parts;
        list.dispatchEvent(new CustomEvent("parts", { bubbles: true }));
      }
      const [made, next] = plaudit.answerList(found.rows, last);
      list.append(...made);
      [last, shown] = [next, shown + found.rows.length];
      const thinned = question.step !== undefined ? steps.step.indexOf(question.step) : -1;
      const part = thinned >= 0 && steps.groups[thinned] < steps.of[thinned] ? ` (${steps.groups[thinned]} of ${steps.of[thinned]} prompts are recorded)` : "";
      count.textContent = `${number(shown)} of ${number(found.total)} answers${part}`
        + (found.indexed < 1 ? `; ${Math.floor(100 * found.indexed)} % of the file is indexed so far` : "");
      more.hidden = shown >= found.total;
      if (found.indexed < 1) setTimeout(() => mine === asked && look(list, count, more), 1500);
    };
    more.onclick = () => further().catch((error) => plaudit.tell(error.message));
    await further();
  };

  plaudit.views.answers = {
    title: "Answers",
    async show(into) {
      const mine = ++plaudit.turn;
      steps = (await ask("steps", { run: plaudit.state.run })) ?? steps;
      if (mine !== plaudit.turn) return;
      if (!steps.step.length) {
        into.replaceChildren(el("p", {}, "This run has no recorded answers. Online methods record them after each step, up to log.samples_megabytes."));
        return;
      }
      const state = plaudit.state;
      const count = el("p", { className: "quiet", role: "status" });
      const list = el("div");
      const more = el("button", { hidden: true }, "More");
      const again = (changes) => {
        plaudit.go(changes);
        look(list, count, more).catch((error) => plaudit.tell(error.message));
        plaudit.tell("");
      };
      let waiting = 0;
      const soon = (changes) => { clearTimeout(waiting); waiting = setTimeout(() => again(changes), 250); };
      const place = state.step === undefined ? steps.step.length - 1 : nearest(Number(state.step));
      const told = (index) => `Step ${steps.step[index]}`;
      const label = el("span", {}, told(place));
      const slider = el("input", { type: "range", min: 0, max: steps.step.length - 1, value: place, disabled: Boolean(state.every),
        "aria-valuetext": told(place), oninput: (event) => {
          const index = Number(event.target.value);
          label.textContent = told(index);
          slider.setAttribute("aria-valuetext", told(index));
          soon({ step: steps.step[index] });
        } });
      const every = el("input", { type: "checkbox", checked: Boolean(state.every), onchange: (event) => {
        slider.disabled = event.target.checked;
        again({ every: event.target.checked ? 1 : "" });
      } });
      const box = (name, text, properties = {}) => el("label", {}, text, el("input", { value: state[name] ?? "", ...properties,
        oninput: (event) => soon({ [name]: event.target.value }) }));
      const fieldRow = el("div", { className: "row" });
      const order = () => fieldRow.replaceChildren(
        plaudit.select("Sort by", [["", "prompt"], ...fields()], state.sort ?? "", (value) => again({ sort: value })),
        plaudit.select("Order", [["", "falling"], ["rising", "rising"]], state.order ?? "", (value) => again({ order: value })),
        plaudit.select("Only with", [["", "any"], ...fields()], state.field ?? "", (value) => again({ field: value })),
        box("least", "from", { className: "number", inputMode: "decimal" }), box("most", "to", { className: "number", inputMode: "decimal" }),
        plaudit.select("Kind", KINDS, state.kind ?? "", (value) => again({ kind: value })),
        plaudit.select("Finish", ENDS, state.finish ?? "", (value) => again({ finish: value })));
      list.addEventListener("parts", order);
      order();
      // On a phone the search is folded, unless it limits what is seen.
      const asks = ["words", "sort", "field", "kind", "finish"].some((name) => state[name]);
      into.replaceChildren(
        el("div", { className: "row" }, el("label", { className: "slide" }, label, slider),
          el("label", { className: "check" }, every, "all steps")),
        el("details", { className: "filters", open: asks || !matchMedia("(max-width: 760px)").matches }, el("summary", {}, "Search, sort, limit"),
          el("div", { className: "row" }, box("words", "Search in prompts and answers", { type: "search", placeholder: "words, or \"a phrase\"" }), fieldRow)),
        count, list, more);
      if (plaudit.carried) into.querySelectorAll("input, select").forEach((control) => { control.disabled = true; });
      await look(list, count, more);
    },
    // New steps are at the slider's end; what is being read stays.
    async refresh(into) {
      const slider = into.querySelector("input[type=range]");
      if (!slider) return this.show(into);
      const mine = plaudit.turn;
      const found = await ask("steps", { run: plaudit.state.run });
      if (mine !== plaudit.turn || !found) return;
      if (plaudit.state.step === undefined) plaudit.go({ step: steps.step[slider.value] });
      steps = found;
      slider.max = steps.step.length - 1;
    },
  };
})();
