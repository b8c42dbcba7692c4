// A run's settings, or those in which two runs differ.
"use strict";

(() => {
  const { el, ask } = plaudit;
  const shown = (value) => (value === undefined ? "absent" : typeof value === "string" ? value : JSON.stringify(value));

  plaudit.views.settings = {
    title: "Settings",
    async show(into) {
      const mine = ++plaudit.turn;
      const { run, with: other } = plaudit.state;
      const [ours, theirs] = await Promise.all([ask("settings", { run }), other ? ask("settings", { run: other }) : null]);
      if (mine !== plaudit.turn) return;
      const rows = el("tbody");
      const find = el("input", { type: "search", oninput: () => list() });
      const same = el("input", { type: "checkbox", onchange: () => list() });
      const list = () => {
        const keys = [...new Set([...Object.keys(ours ?? {}), ...Object.keys(theirs ?? {})])];
        const kept = keys.filter((key) => key.includes(find.value) && (!theirs || same.checked || shown(ours[key]) !== shown(theirs[key])));
        rows.replaceChildren(...kept.map((key) => el("tr", { className: theirs && same.checked && shown(ours[key]) !== shown(theirs[key]) ? "differs" : "" },
          el("td", {}, key), el("td", {}, shown(ours[key])), theirs ? el("td", {}, shown(theirs[key])) : null)));
        if (!kept.length) rows.append(el("tr", {}, el("td", { colSpan: 3 }, theirs ? "The settings of both runs are equal." : "No setting has this in its name.")));
      };
      list();
      into.replaceChildren(
        el("div", { className: "row" }, el("label", {}, "Find a setting", find), theirs ? el("label", { className: "check" }, same, "also equal ones") : "",
          theirs ? "" : el("span", { className: "quiet" }, "Choose a second run above to see what differs.")),
        el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), el("th", {}, run), theirs ? el("th", {}, other) : null)), rows)));
    },
  };
})();
