// A run's settings, or those in which runs differ.
"use strict";

(() => {
  const { el, ask } = plaudit;
  const shown = (value) => (value === undefined ? "absent" : typeof value === "string" ? value : JSON.stringify(value));

  plaudit.views.settings = {
    title: "Settings",
    async show(into) {
      const mine = ++plaudit.turn;
      const names = plaudit.shown();
      const found = (await Promise.all(names.map((run) => ask("settings", { run })))).map((one) => one ?? {});
      if (mine !== plaudit.turn) return;
      const several = names.length > 1;
      const rows = el("tbody");
      const find = el("input", { type: "search", oninput: () => list() });
      const same = el("input", { type: "checkbox", onchange: () => list() });
      const differ = (key) => new Set(found.map((one) => shown(one[key]))).size > 1;
      const list = () => {
        const keys = [...new Set(found.flatMap(Object.keys))];
        const kept = keys.filter((key) => key.includes(find.value) && (!several || same.checked || differ(key)));
        rows.replaceChildren(...kept.map((key) => el("tr", { className: several && same.checked && differ(key) ? "differs" : "" },
          el("td", {}, key), found.map((one) => el("td", {}, shown(one[key]))))));
        if (!kept.length) rows.append(el("tr", {}, el("td", { colSpan: 1 + names.length }, several ? "The settings of these runs are equal." : "No setting has this in its name.")));
      };
      list();
      into.replaceChildren(
        el("div", { className: "row" }, el("label", {}, "Find a setting", find), several ? el("label", { className: "check" }, same, "also equal ones") : "",
          several ? "" : el("span", { className: "quiet" }, "Compare with another run to see what differs.")),
        el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Settings" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"),
          names.map((name) => el("th", {}, several ? plaudit.swatch(name) : null, name)))), rows)));
    },
  };
})();
