// What each worker did when: a lane for each, a colour for each phase, a mark for each turn of an episode, and the sums
// as a table.
"use strict";

(() => {
  const { el, ask, number, duration, cssColor } = plaudit;
  const HEIGHT = 26;
  let last = [];
  let range = null;

  // Round times within a stretch, at most `most`: every 1, 2 or 5 times a power of ten; above that whole minutes and hours.
  plaudit.ticks = (from, to, most) => {
    const small = Array.from({ length: 15 }, (_, place) => [1, 2, 5][place % 3] * 10 ** (Math.floor(place / 3) - 3)).filter((one) => one < 60);
    const large = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000, 4320000];
    const every = [...small, ...large].find((one) => (to - from) / one < most) ?? to - from;
    const first = Math.ceil(from / every - 1e-9);
    return Array.from({ length: Math.floor(to / every + 1e-9) - first + 1 }, (_, index) => Number(((first + index) * every).toFixed(3)));
  };

  const draw = (canvas, workers, phases, tip) => {
    const width = canvas.clientWidth;
    const left = Math.min(150, width / 3);
    const [from, to] = range;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = (workers.length * HEIGHT + 22) * ratio;
    canvas.style.height = `${workers.length * HEIGHT + 22}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui";
    context.textBaseline = "middle";
    const x = (time) => left + ((time - from) / (to - from)) * (width - left);
    workers.forEach((worker, lane) => {
      context.fillStyle = cssColor("--line");
      context.fillRect(0, (lane + 1) * HEIGHT - 1, width, 1);
    });
    for (const one of last) {
      if (one.end < from || one.begin > to) continue;
      const begin = Math.max(left, x(one.begin));
      context.fillStyle = cssColor(`--c${phases.indexOf(one.phase) % 8}`);
      context.fillRect(begin, workers.indexOf(one.worker) * HEIGHT + 4, Math.max(1, Math.min(width, x(one.end)) - begin), HEIGHT - 9);
      context.fillStyle = cssColor("--text");
      for (const turn of one.turns ?? []) {
        const place = x(one.begin + turn);
        if (place >= left) context.fillRect(place, workers.indexOf(one.worker) * HEIGHT + HEIGHT - 10, 1, 5);
      }
    }
    context.clearRect(0, 0, left, workers.length * HEIGHT);
    context.fillStyle = cssColor("--text");
    workers.forEach((worker, lane) => context.fillText(plaudit.visible(worker).slice(0, 24), 4, lane * HEIGHT + HEIGHT / 2, left - 8));
    context.fillStyle = cssColor("--quiet");
    const zero = Math.min(...last.map((one) => one.begin));
    for (const time of plaudit.ticks(from - zero, to - zero, Math.max(2, Math.floor((width - left) / 90)))) {
      const place = x(zero + time);
      const text = time % 1 || to - from < 60 ? `${number(time, 9)} s` : duration(time);
      const half = context.measureText(text).width / 2;
      context.fillRect(place, workers.length * HEIGHT, 1, 4);
      context.textAlign = "center";
      context.fillText(text, Math.min(width - half, place), workers.length * HEIGHT + 12);
    }
    context.textAlign = "left";
    canvas.onmousemove = (event) => {
      const time = from + ((event.offsetX - left) / (width - left)) * (to - from);
      const worker = workers[Math.floor(event.offsetY / HEIGHT)];
      const there = last.find((one) => one.worker === worker && one.begin <= time && one.end >= time);
      const turns = there?.turns ? ", with ends of turns as marks" : "";
      tip.textContent = there ? plaudit.visible(`${there.worker} ${there.phase} for ${number(there.end - there.begin, 3)} s, with version ${there.version}${turns}`) : "\u00a0";
    };
  };

  const sums = (workers, span) => {
    const rows = [];
    for (const worker of workers) {
      const spent = {};
      last.filter((one) => one.worker === worker).forEach((one) => { spent[one.phase] = (spent[one.phase] ?? 0) + one.end - one.begin; });
      Object.entries(spent).forEach(([phase, seconds]) => rows.push(el("tr", {}, el("td", {}, worker), el("td", {}, phase),
        el("td", { className: "n" }, duration(seconds)), el("td", { className: "n" }, `${Math.round((100 * seconds) / span)} %`))));
    }
    return el("div", { className: "scroll" }, el("table", {}, el("caption", { className: "quiet" }, "Time of each worker"), el("thead", {}, el("tr", {},
      el("th", {}, "worker"), el("th", {}, "does"), el("th", { className: "n" }, "time"), el("th", { className: "n" }, "share"))), el("tbody", {}, rows)));
  };

  plaudit.views.lanes = {
    title: "Workers",
    async show(into) {
      const mine = ++plaudit.turn;
      const found = await ask("events", { run: plaudit.state.run });
      if (mine !== plaudit.turn) return;
      last = found ?? [];
      if (!last.length) {
        into.replaceChildren(el("p", {}, "Nothing has been recorded yet of who does what."));
        return;
      }
      const workers = [...new Set(last.map((one) => one.worker))].sort();
      const phases = [...new Set(last.map((one) => one.phase))].sort();
      const all = [Math.min(...last.map((one) => one.begin)), Math.max(...last.map((one) => one.end))];
      const span = Math.max(all[1] - all[0], 0.001);
      range = [Math.max(all[0], all[1] - Math.max(30, span / 20)), Math.max(all[1], all[0] + 0.001)];
      const canvas = el("canvas", { className: "lanes", role: "img", "aria-label": `Lanes of ${workers.length} workers; the table below has their times` });
      const tip = el("p", { className: "about quiet" }, "\u00a0");
      const again = () => draw(canvas, workers, phases, tip);
      const move = (scale, shift) => () => {
        const [from, to] = range;
        const half = Math.max(0.01, ((to - from) * scale) / 2);
        const middle = (from + to) / 2 + (to - from) * shift;
        range = [Math.max(all[0], middle - half), Math.min(all[1], middle + half)];
        if (range[1] <= range[0]) range = [...all];
        again();
      };
      const key = phases.map((phase, number) => {
        const box = el("i");
        box.style.background = `var(--c${number % 8})`;
        return el("span", { className: "key" }, box, phase);
      });
      const button = (text, label, act) => el("button", { onclick: act, "aria-label": label, title: label }, text);
      into.replaceChildren(
        el("div", { className: "row" }, button("\u2190", "earlier", move(1, -0.5)), button("\u2192", "later", move(1, 0.5)),
          button("+", "closer", move(0.5, 0)), button("\u2212", "wider", move(2, 0)),
          button("All", null, () => { range = [...all]; again(); }), key),
        canvas, tip, sums(workers, span));
      again();
      addEventListener("resize", () => canvas.isConnected && again());
    },
  };
})();
