// All runs as a table: the settings in which those that are shown differ, the last and the best figures; sorted by any column.
"use strict";

(() => {
  const { el, ask, number } = plaudit;
  const LONG = 40;
  let found = { settings: [], figures: [], rows: [], pending: 0 };

  // Columns: a title, what is shown of a row, and by what it is sorted.
  const columns = (rows) => {
    const plain = [["run", (row) => row.name], ["state", (row) => row.state], ["method", (row) => row.method], ["step", (row) => row.step]]
      .map(([title, value]) => ({ title, value }));
    const figures = found.figures.flatMap((name) => {
      const of = (place) => (row) => row.figures?.[name]?.[place] ?? null;
      const some = (place) => rows.some((row) => of(place)(row) !== null);
      return [some(0) && { title: `${name}, last`, value: of(0) }, some(2) && { title: `${name}, best`, value: of(2), at: of(3) }].filter(Boolean);
    });
    const settings = found.settings.filter((key) => new Set(rows.filter((row) => row.state !== "unreadable").map((row) => row.settings[key])).size > 1)
      .map((key) => ({ title: key, value: (row) => row.settings[key] ?? null, setting: true }));
    return [...plain, ...figures, ...settings];
  };

  const order = (rows, column, falling) => {
    const by = rows.map((row) => [column.value(row), row]);
    const numeric = by.every(([value]) => value === null || (value !== "" && Number.isFinite(Number(value))));
    const compared = (a, b) => (numeric ? Number(a) - Number(b) : String(a).localeCompare(String(b), "en", { numeric: true }));
    return by.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (falling ? -1 : 1) * compared(a, b))).map(([, row]) => row);
  };

  const cell = (column, row) => {
    const value = column.value(row);
    if (column.title === "run") {
      return el("th", { scope: "row" }, el("button", { "data-key": row.name, onclick: () => { plaudit.open(row.name); plaudit.go({ tab: "curves", step: "", prompt: "" }); plaudit.render(); } }, row.name));
    }
    if (column.title === "state") return el("td", {}, el("span", { className: `state ${row.state}` }, row.state));
    if (column.setting) return el("td", { title: value !== null && value.length > LONG ? plaudit.visible(value) : null }, value === null ? "" : value.length > LONG ? `${value.slice(0, LONG)}\u2026` : value);
    if (typeof value !== "number") return el("td", {}, value ?? (row.figures || column.title === "method" ? "" : "\u2026"));
    return el("td", { className: "n" }, number(value), column.at && el("small", { className: "quiet" }, ` at ${number(column.at(row))}`));
  };

  const broken = (text) => text.split(/(?<=[/._])/).flatMap((part) => [el("wbr"), part]); // a long name breaks between its words

  const draw = (into) => {
    const { by = "", way = "", only = "" } = plaudit.state;
    const [shown, find] = [plaudit.shown(), into.querySelector("input[type=search]").value];
    const rows = found.rows.filter((row) => `${row.name} ${row.method}`.includes(find) && (!only || shown.includes(row.name)));
    const all = columns(rows);
    const sorted = all.find(({ title }) => title === by);
    const head = all.map((column) => el("th", { scope: "col", className: column.value(rows[0] ?? { settings: {} }) > -Infinity && !column.setting ? "n" : "",
      "aria-sort": column === sorted ? (way ? "ascending" : "descending") : "none" },
    el("button", { "data-key": `by ${column.title}`, onclick: () => { plaudit.go({ by: column.title, way: column === sorted && !way ? "rising" : "" }); draw(into); } },
      broken(column.title), el("span", { "aria-hidden": "true" }, column === sorted ? (way ? " \u25b2" : " \u25bc") : ""))));
    const body = (sorted ? order(rows, sorted, !way) : rows).map((row) => el("tr", { "aria-current": row.name === plaudit.state.run ? "true" : null },
      el("td", {}, el("span", { className: "pick" }, plaudit.picker(row.name), shown.length > 1 && shown.includes(row.name) ? plaudit.swatch(row.name) : null)), all.map((column) => cell(column, row))));
    const focused = document.activeElement?.dataset;
    const [key, run] = [focused?.key, focused?.run];
    into.querySelector(".runs").replaceChildren(el("table", {},
      el("thead", {}, el("tr", {}, el("td", {}), head)), el("tbody", {}, body)));
    into.querySelector("[role=status]").textContent = `${rows.length} run${rows.length === 1 ? "" : "s"}${found.pending ? `; the figures of ${found.pending} are still being read` : ""}`;
    if (key || run) [...into.querySelectorAll("[data-key], [data-run]")].find(({ dataset }) => (key ? dataset.key === key : dataset.run === run))?.focus();
  };

  const look = async (into, mine) => {
    const next = await ask("table");
    if (mine !== plaudit.turn || !next) return;
    found = next;
    draw(into);
    if (found.pending) await look(into, mine);
  };

  plaudit.views.table = {
    title: "All runs",
    all: true,
    async show(into) {
      const mine = ++plaudit.turn;
      if (!into.querySelector(".runs")) {
        const only = el("input", { type: "checkbox", checked: Boolean(plaudit.state.only), onchange: (event) => { plaudit.go({ only: event.target.checked ? 1 : "" }); draw(into); } });
        into.replaceChildren(
          el("div", { className: "row" }, el("label", {}, "Find in names and methods", el("input", { type: "search", oninput: () => draw(into) })),
            el("label", { className: "check" }, only, "only those compared"), el("p", { className: "quiet", role: "status" }, "Reading figures")),
          el("div", { className: "scroll runs", tabIndex: 0, role: "region", "aria-label": "All runs" }));
      }
      if (found.rows.length) draw(into);
      await look(into, mine);
    },
    async refresh(into) { await look(into, ++plaudit.turn); },
  };
})();
