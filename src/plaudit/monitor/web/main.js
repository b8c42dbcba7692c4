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
  const progress = (run) => (run.steps ? `step ${run.step} of ${run.steps}` : "no step yet");

  const listRuns = () => {
    const focused = document.activeElement?.dataset?.run;
    list.replaceChildren(...runs.filter((run) => `${run.name} ${run.method}`.includes(find.value)).map((run) => el("li", {},
      el("button", { "aria-current": run.name === plaudit.state.run ? "true" : null, "data-run": run.name, onclick: () => {
        plaudit.go({ run: run.name, step: "", prompt: "", with: plaudit.state.with === run.name ? "" : plaudit.state.with });
        if (matchMedia("(max-width: 760px)").matches) document.getElementById("runs").open = false;
        plaudit.render();
      } }, el("span", { className: "name" }, run.name), el("small", {}, el("span", { className: `state ${run.state}` }, run.state),
        ` ${run.method}, ${progress(run)}, ${ago(run.changed)}`)))));
    if (focused) [...list.querySelectorAll("button")].find((button) => button.dataset.run === focused)?.focus();
  };

  const title = () => {
    const run = chosen();
    const others = runs.filter((one) => one.name !== run.name).map((one) => [one.name, one.name]);
    document.title = `${run.name}: step ${run.step}`;
    document.getElementById("title").replaceChildren(
      el("div", { className: "row" }, el("div", {}, el("h2", {}, run.name),
        el("span", { className: "quiet" }, el("span", { className: `state ${run.state}` }, run.state), ` ${run.method}, ${progress(run)}`, run.last ? `: ${run.last}` : "")),
      others.length ? plaudit.select("Beside", [["", "no other run"], ...others], plaudit.state.with ?? "", (value) => { plaudit.go({ with: value }); plaudit.render(); }) : "",
      plaudit.carried ? "" : el("button", { onclick: () => exported().catch((error) => plaudit.tell(error.message)) }, "Export")));
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
    const now = `${run.name} ${run.changed} ${run.state}`;
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
