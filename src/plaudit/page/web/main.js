// The list of runs, the views of one, and looking again while it goes on.
"use strict";

(() => {
  const { el, ask } = plaudit;
  const EVERY = 4000;
  const view = document.getElementById("view");
  const list = document.getElementById("list");
  const find = document.getElementById("find");
  let runs = [];
  let before = "";

  const ago = (time) => {
    const seconds = Date.now() / 1000 - time;
    return seconds < 60 ? "now" : seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : new Date(time * 1000).toISOString().slice(0, 10);
  };
  const chosen = () => runs.find((run) => run.name === plaudit.state.run);
  plaudit.known = (name) => runs.some((run) => run.name === name);
  plaudit.chosen = chosen;
  const progress = (run) => (run.steps ? `step ${run.step} of ${run.steps}` : "no step yet");

  // Each run can be opened, and compared with the open one; what is compared has its colour here as everywhere.
  const listRuns = () => {
    const focused = document.activeElement?.dataset?.run;
    const shown = plaudit.shown();
    list.replaceChildren(...runs.filter((run) => `${run.name} ${run.method}`.includes(find.value)).map((run) => el("li", {},
      el("button", { "aria-current": run.name === plaudit.state.run ? "true" : null, "data-run": run.name, onclick: () => {
        plaudit.open(run.name);
        plaudit.go({ step: "", prompt: "" });
        if (matchMedia("(max-width: 760px)").matches) document.getElementById("runs").open = false;
        plaudit.render();
      } }, el("span", { className: "name" }, run.name), el("small", {}, el("span", { className: `state ${run.state}` }, run.state),
        ` ${run.method}, ${progress(run)}, ${ago(run.changed)}`)),
      shown.length > 1 && shown.includes(run.name) ? plaudit.swatch(run.name) : null, runs.length > 1 ? plaudit.picker(run.name) : null)));
    if (focused) [...list.querySelectorAll("[data-run]")].find((one) => one.dataset.run === focused)?.focus();
  };

  plaudit.picker = (name) => el("input", { type: "checkbox", checked: plaudit.shown().includes(name), disabled: name === plaudit.state.run,
    "data-run": `compare ${name}`, "aria-label": plaudit.visible(`Compare ${name}`), title: "Compare", onchange: (event) => {
      plaudit.compare(name, event.target.checked);
      plaudit.render();
    } });

  const title = () => {
    const run = chosen();
    const shown = plaudit.shown();
    document.title = `${run.name}: step ${run.step}`;
    const chip = (name) => el("li", { className: "chip", onmouseenter: () => plaudit.highlight?.(name), onmouseleave: () => plaudit.highlight?.(null) },
      plaudit.swatch(name), name, name === run.name ? null
        : el("button", { "aria-label": plaudit.visible(`Compare no longer with ${name}`), onclick: () => { plaudit.compare(name, false); plaudit.render(); } }, "\u00d7"));
    document.getElementById("title").replaceChildren(
      el("div", { className: "row" }, el("div", {}, el("h2", {}, run.name),
        el("span", { className: "quiet" }, el("span", { className: `state ${run.state}` }, run.state), ` ${run.method}, ${progress(run)}`, run.last ? `: ${run.last}` : "")),
      plaudit.carried ? "" : el("button", { onclick: () => exported().catch((error) => plaudit.tell(error.message)) }, "Export")),
      shown.length < 2 ? "" : el("ul", { className: "chips", "aria-label": "Runs that are compared" }, shown.map(chip),
        el("li", {}, el("button", { onclick: () => { plaudit.alone(); plaudit.render(); } }, "Only this run"))));
  };

  const tabs = () => document.getElementById("tabs").replaceChildren(...Object.entries(plaudit.views).map(([name, one]) =>
    el("button", { "aria-current": name === tab() ? "page" : null, onclick: () => { plaudit.go({ tab: name }); plaudit.render(); document.querySelector("#tabs [aria-current]").focus(); } }, one.title)));
  const tab = () => (plaudit.views[plaudit.state.tab] ? plaudit.state.tab : "curves");

  // One HTML file with what is seen now, made by the server: it knows the digests that the file's policy names.
  const exported = async () => {
    const token = sessionStorage.getItem("plaudit-token");
    const response = await fetch(`api/export?${new URLSearchParams(plaudit.state)}`, token ? { headers: { authorization: `Bearer ${token}` } } : {});
    if (!response.ok) throw new Error(await response.text());
    const link = el("a", { href: URL.createObjectURL(await response.blob()), download: `${plaudit.state.run.replace(/[^\w.-]+/g, "-")}.html` });
    link.click();
    URL.revokeObjectURL(link.href);
  };

  plaudit.render = async () => {
    listRuns();
    if (!chosen()) return;
    title();
    tabs();
    plaudit.tell("");
    try {
      await plaudit.views[tab()].show(view);
    } catch (error) {
      plaudit.tell(error.message);
    }
  };

  const look = async () => {
    const found = await ask("runs");
    runs = found.runs;
    document.getElementById("where").textContent = plaudit.visible(found.folder);
    if (!chosen() && runs.length) plaudit.go({ run: runs[0].name });
    const run = chosen();
    if (!run) {
      view.replaceChildren(el("p", {}, "There is no run in this folder yet. Start one, and it appears here."));
      return;
    }
    const followed = runs.filter((one) => plaudit.views[tab()].all || plaudit.shown().includes(one.name));
    const now = followed.map((one) => `${one.name} ${one.changed} ${one.state}`).join();
    const first = !before;
    const changed = now !== before;
    before = now;
    if (first) return plaudit.render();
    listRuns();
    if (changed && !document.querySelector("#title :focus")) title();
    if (changed && plaudit.views[tab()].refresh) await plaudit.views[tab()].refresh(view);
  };

  const again = async () => {
    try {
      if (!document.hidden) await look();
      if (document.getElementById("problem").dataset.lost) plaudit.tell("");
      delete document.getElementById("problem").dataset.lost;
    } catch (error) {
      document.getElementById("problem").dataset.lost = "1";
      plaudit.tell(error instanceof TypeError ? "The server does not answer; this page shows what it has." : error.message);
    }
    if (!plaudit.carried) setTimeout(again, EVERY);
  };

  find.addEventListener("input", listRuns);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plaudit.render());
  if (matchMedia("(max-width: 760px)").matches) document.getElementById("runs").open = false;
  again();
})();
