// How many answers of a step have which reward, as shades; and what a run warned of, each alarm once.
"use strict";

(() => {
  const { el, ask, number, cssColor } = plaudit;

  plaudit.heat = async (into, run, axis) => {
    const mine = plaudit.turn;
    const found = await ask("rewards", { run: run.name });
    if (mine !== plaudit.turn || !found || !into.isConnected) return;
    if (found.indexed < 1 && !plaudit.carried) setTimeout(() => mine === plaudit.turn && plaudit.heat(into, run, axis).catch(() => {}), 2000);
    if (!found.total) return;
    const { first, every, low, high, bins, counts } = found;
    const at = plaudit.along(axis, run.metrics);
    const columns = counts.map((column, index) => ({ column, of: column.reduce((sum, one) => sum + one, 0), step: first + index * every }))
      .map((one) => ({ ...one, left: at(one.step - 0.5), right: at(one.step + every - 0.5) }))
      .filter(({ of, left, right }) => of && left !== null && right !== null);
    const largest = Math.max(...columns.flatMap(({ column, of }) => column.map((one) => one / of)));
    const height = (high - low) / bins;
    const paint = (chart) => {
      const { ctx, bbox } = chart;
      ctx.save();
      ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
      ctx.fillStyle = cssColor("--c0");
      for (const { column, of, left, right } of columns) {
        const [begin, end] = [left, right].map((value) => Math.round(chart.valToPos(value, "x", true)));
        column.forEach((count, row) => {
          if (!count) return;
          const [bottom, top] = [low + row * height, low + (row + 1) * height].map((value) => Math.round(chart.valToPos(value, "y", true)));
          ctx.globalAlpha = 0.1 + 0.9 * Math.sqrt(count / of / largest);
          ctx.fillRect(begin, top, Math.max(1, end - begin), Math.max(1, bottom - top));
        });
      }
      ctx.restore();
    };
    const about = el("p", { className: "about quiet" });
    const tell = (chart) => {
      const { left, top } = chart.cursor;
      const [x, y] = left >= 0 && chart.root.matches(":hover") ? [chart.posToVal(left, "x"), chart.posToVal(top, "y")] : [null, null];
      const there = x === null ? null : columns.find((one) => one.left <= x && x < one.right);
      const row = Math.min(bins - 1, Math.floor((y - low) / height));
      if (!there || row < 0) {
        about.textContent = `${number(found.total)} answers; the darker, the larger their share of the step.`;
        return;
      }
      const steps = every > 1 ? `steps ${there.step} to ${there.step + every - 1}` : `step ${there.step}`;
      about.textContent = `${steps}, reward ${number(low + row * height, 3)} to ${number(low + (row + 1) * height, 3)}: ${number(there.column[row])} of ${number(there.of)} answers`;
    };
    const frame = el("div", { role: "img", "aria-label": `Rewards of ${found.total} answers by step, from ${number(low)} to ${number(high)}` });
    into.hidden = false;
    into.replaceChildren(el("h3", {}, plaudit.shown().length > 1 ? `Rewards of the answers of ${run.name}` : "Rewards of the answers"), frame, about);
    const edges = [columns[0].left, ...columns.map(({ right }) => right)];
    const chart = new uPlot({
      width: Math.max(240, frame.clientWidth), height: 200, legend: { show: false },
      series: [{ label: axis }, { paths: () => null, points: { show: false } }],
      scales: { x: { time: false, range: (chart, from, to) => [from, to] }, y: { range: () => [low, high] } }, axes: plaudit.axes(axis),
      cursor: { sync: { key: "plaudit", scales: ["x", null] }, drag: { x: true, y: false }, points: { show: false } },
      hooks: { drawAxes: [paint], setCursor: [tell] },
    }, [edges, edges.map(() => low)], frame);
    tell(chart);
    plaudit.drawn({ chart, frame });
  };

  // What was dismissed is kept by this browser: for each folder and run, the rules. An exported page keeps nothing.
  const kept = () => { try { return JSON.parse(localStorage.getItem("plaudit-dismissed")) ?? {}; } catch { return {}; } };
  const keep = (all) => { try { localStorage.setItem("plaudit-dismissed", JSON.stringify(all)); } catch { /* a private window */ } };

  const merged = (health) => {
    const found = new Map();
    for (const one of health) {
      const before = found.get(one.sign);
      const [last, count] = [Math.max(one.step, one.last ?? one.step), one.count ?? 1];
      found.set(one.sign, before ? { ...one, step: Math.min(before.step, one.step), last: Math.max(before.last, last), count: before.count + count } : { ...one, last, count });
    }
    return [...found.values()].sort((a, b) => a.step - b.step);
  };

  // Shows what a run warned of, each rule once, and returns what was not dismissed.
  plaudit.alarms = (into, health) => {
    const key = `${document.getElementById("where").textContent} ${plaudit.state.run}`;
    const box = into.appendChild(el("div", { className: "alarms", hidden: !health.length }));
    const all = merged(health);
    const dismissed = new Set(kept()[key] ?? []);
    const dismiss = (signs) => {
      keep({ ...kept(), [key]: signs });
      plaudit.render().then(() => document.querySelector(".alarms button")?.focus());
    };
    const raised = all.filter(({ sign }) => !dismissed.has(sign));
    const away = all.length - raised.length;
    const when = ({ step, last, count }) => (last > step ? `Steps ${step} to ${last}` : `Step ${step}`) + (count > 1 ? ` (${count} times)` : "");
    const whose = plaudit.shown().length > 1 ? ` of ${plaudit.state.run}` : "";
    box.append(el("h3", {}, raised.length ? `${raised.length} alarm${raised.length > 1 ? "s" : ""}${whose}` : `No other alarm${whose}`),
      el("ul", {}, raised.map((alarm) => el("li", {}, el("div", { className: "head" }, el("div", {}, el("b", {}, `${when(alarm)}, ${alarm.sign}: `), alarm.saw),
        el("button", { "aria-label": plaudit.visible(`Dismiss ${alarm.sign}`), onclick: () => dismiss([...dismissed, alarm.sign]) }, "Dismiss")),
      el("div", { className: "quiet" }, alarm.why), el("div", {}, alarm.advice)))));
    if (away) box.append(el("button", { onclick: () => dismiss([]) }, `${away} dismissed: show again`));
    box.classList.toggle("calm", !raised.length);
    return raised;
  };
})();
