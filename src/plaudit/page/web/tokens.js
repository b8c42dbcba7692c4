// One answer: its tokens coloured by the gap of log-probs, entropy or advantage, and all that is known of it.
"use strict";

(() => {
  const { el, ask, number } = plaudit;
  const WAYS = {
    gap: ["log-prob gap (learner - sampler)", (a) => a.learner && a.logprobs && a.learner.map((value, place) => value - a.logprobs[place])],
    entropy: ["entropy, nats", (a) => a.entropies],
    advantage: ["advantage", (a) => a.advantages ?? (a.advantage === null || a.advantage === undefined ? null : a.pieces.map(() => a.advantage))],
    logprob: ["sampler's log-prob", (a) => a.logprobs],
    plain: ["nothing", () => null],
  };

  const spread = (values) => (values ? Math.max(...values) - Math.min(...values) : 0);
  // What varies among an answer's tokens comes first, what is the same for all of them last; what was not recorded is
  // left out. A gap of log-probs below 0.0001 is rounding.
  const ways = (answer) => {
    const found = Object.entries(WAYS).map(([name, [title, read]]) => ({ name, title, values: read(answer) }))
      .filter(({ name, values }) => name === "plain" || values?.length);
    const varies = ({ name, values }) => spread(values) > (name === "gap" ? 1e-4 : 1e-9);
    const [some, none] = [found.filter(varies), found.filter((one) => !varies(one) && one.name !== "plain")];
    return { varying: some.map(({ name }) => name),
      choices: [...some, ...found.filter(({ name }) => name === "plain"), ...none].map(({ name, title }) => [name, none.some((one) => one.name === name) ? `${title} (the same for all)` : title]) };
  };

  // Blue for positive, orange for negative, white for 0; the text on it is dark in both schemes.
  const shade = (share) => {
    const [r, g, b] = share >= 0 ? [96, 165, 250] : [251, 146, 60];
    const mix = (full) => Math.round(255 + (full - 255) * Math.min(1, Math.abs(share)));
    return `rgb(${mix(r)}, ${mix(g)}, ${mix(b)})`;
  };

  // Which tokens the environment said: `turns` are lengths of the policy's tokens and the environment's, in turn.
  const heard = (answer) => (answer.turns ?? []).flatMap((count, turn) => Array(count).fill(turn % 2 === 1));

  const colour = (into, scale, answer, way) => {
    const [title, read] = WAYS[way];
    const values = read(answer);
    const largest = values ? Math.max(1e-9, ...values.map(Math.abs)) : 0;
    const others = heard(answer);
    const spans = answer.pieces.map((piece, place) => {
      const span = el("span", { className: others[place] ? "heard" : values ? "" : "plain", tabIndex: -1 }, piece);
      if (values && !others[place]) span.style.background = shade(values[place] / largest);
      span.dataset.place = place;
      return span;
    });
    into.replaceChildren(...spans);
    const ramp = el("i");
    ramp.style.background = `linear-gradient(90deg, ${shade(-1)}, ${shade(0)}, ${shade(1)})`;
    scale.replaceChildren(...(values ? [`${title}: ${number(-largest, 3)}`, ramp, number(largest, 3)] : way === "plain" ? [] : [`${title}: not recorded for this answer`]));
  };

  const described = (answer, place) => {
    const at = (values) => (values ? number(values[place]) : null);
    if (heard(answer)[place]) return `${place + 1} of ${answer.ids.length}, ${JSON.stringify(answer.pieces[place])}: said by the environment, not trained`;
    const facts = [["token", answer.ids[place]], ["sampler", at(answer.logprobs)], ["learner", at(answer.learner)],
      ["entropy", at(answer.entropies)], ["advantage", at(answer.advantages) ?? number(answer.advantage)]];
    return `${place + 1} of ${answer.ids.length}, ${JSON.stringify(answer.pieces[place])}: `
      + facts.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${value}`).join(", ");
  };

  plaudit.facts = (answer, ...more) => {
    const fact = (name, value, kind = "") => el("span", { className: kind }, `${name} `, el("b", {}, value));
    const versions = answer.versions ?? [];
    const sampled = versions.length ? (versions.length > 1 ? `${versions[0]} to ${versions[versions.length - 1]}` : String(versions[0])) : "none";
    return el("span", { className: "facts" },
      answer.reward === null ? el("span", { className: "none" }, `no reward${answer.reason ? `: ${answer.reason}` : ""}`) : fact("reward", number(answer.reward), "reward"),
      Object.entries(answer.parts ?? {}).map(([name, value]) => fact(name, number(value))),
      answer.advantage === null || answer.advantage === undefined ? null : fact("advantage", number(answer.advantage)),
      fact("length", answer.tokens), fact("version", sampled), fact("finish", answer.finish),
      answer.greedy ? el("span", {}, "greedy") : null, ...more);
  };

  // What rules compare answers with, to stand below the prompt; "" for a prompt without a reference.
  plaudit.reference = (row, properties = {}) => (row.answer ? el("div", { className: "text", ...properties }, `reference: ${row.answer}`) : "");

  plaudit.said = (answer) => el("span", { className: "text" },
    answer.completion || el("span", { className: "quiet" }, "(an empty answer)"));

  // An episode as a chat: what the environment said is grey, calls of tools are folded.
  const chat = (messages) => el("div", {}, messages.map((one) => el("div", { className: one.role === "assistant" ? "turn" : "turn heard" },
    el("b", {}, one.name ? `${one.role} (${one.name})` : one.role), el("div", { className: "text" }, one.content),
    (one.tool_calls ?? []).map((call) => el("details", {}, el("summary", {}, `calls ${call.function.name}`),
      el("code", {}, JSON.stringify(call.function.arguments)))))));

  plaudit.showAnswer = async (run, at) => {
    const dialog = document.getElementById("answer");
    const answer = await ask("answer", { run, at });
    const box = el("p", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens; arrow keys go from one to the next" });
    const scale = el("p", { className: "scale" });
    const about = el("p", { className: "about quiet", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
    let place = -1;
    const mark = (next) => {
      if (next < 0 || next >= answer.pieces.length) return;
      box.children[place]?.removeAttribute("aria-current");
      place = next;
      box.children[place].setAttribute("aria-current", "true");
      about.textContent = plaudit.visible(described(answer, place));
    };
    box.addEventListener("mouseover", (event) => event.target.dataset.place && mark(Number(event.target.dataset.place)));
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { mark(place + step); event.preventDefault(); }
    });
    const { varying, choices } = ways(answer);
    const way = [plaudit.state.colour].find((name) => name === "plain" || varying.includes(name)) ?? varying[0] ?? "plain";
    const choose = plaudit.select("Colour by", choices, way, (value) => { plaudit.go({ colour: value }); colour(box, scale, answer, value); });
    colour(box, scale, answer, way);
    dialog.replaceChildren(
      el("div", { className: "head" },
        el("h2", { id: "answer-title" }, `Step ${answer.step}, group ${answer.group}, sample ${answer.sample} (${answer.kind})`),
        el("button", { onclick: () => dialog.close() }, "Close")),
      el("p", {}, plaudit.facts(answer)),
      el("h3", {}, "Prompt "), el("p", { className: "quiet" }, answer.prompt_id), el("div", { className: "text" }, answer.prompt), plaudit.reference(answer),
      el("h3", {}, answer.messages ? "Episode" : "Answer"), answer.messages ? chat(answer.messages) : plaudit.said(answer),
      el("h3", {}, "By token"), el("div", { className: "row" }, choose), box, about, scale);
    if (!dialog.open) dialog.showModal();
  };
})();
