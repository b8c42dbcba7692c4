// Curves over steps, time or tokens: one picture for figures that belong together, alarms as marks on all.
"use strict";

(() => {
  const { el, ask, number, cssColor } = plaudit;
  const PICTURES = [
    ["Reward", ["reward/mean", "validation/reward/mean", "evaluation/reward/mean"]],
    ["Judge and gold", ["reward/judge", "reward/gold", "validation/reward/judge", "validation/reward/gold", "evaluation/reward/judge", "evaluation/reward/gold"]],
    ["Loss", ["loss/policy", "loss/critic", "loss/judge", "validation/loss"]],
    ["Accuracy", ["accuracy", "validation/accuracy"]],
    ["KL to the reference", ["kl/reference", "kl/loss"]],
    ["Entropy, nats a token", ["entropy"]],
    ["Answer length, tokens", ["length/mean", "length/max"]],
    ["Shares: unfinished, failed, equal groups, clipped", ["unfinished", "reward/failed", "reward/not_applicable", "groups/equal", "clip_fraction"]],
    ["KL between sampler and learner", ["kl/sampler"]],
    ["Age of samples, versions", ["lag/mean", "lag/max"]],
    ["Gradient norm", ["gradient_norm/policy", "gradient_norm/critic", "gradient_norm/judge"]],
    ["Tokens per second", ["tokens_per_second"]],
    ["Seconds a step", ["time/step", "time/batch", "time/learn"]],
  ];
  const AXES = [["step", "step"], ["time", "time, s"], ["tokens", "tokens"]];
  const WHOLE = Array.from({ length: 39 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3)); // between marks of steps
  let drawn = []; // { chart, frame, fill }
  let shape = "";

  const pictures = (names) => {
    const left = new Set(names.filter((name) => !["step", "epoch", "time", "tokens"].includes(name)));
    const found = [];
    for (const [title, wanted] of PICTURES) {
      const here = wanted.filter((name) => left.delete(name));
      const held = title !== "Judge and gold" || here.some((name) => name.endsWith("/gold"));
      if (here.length) found.push([held ? title : "Judge", here]);
    }
    const parts = [...left].filter((name) => name.startsWith("reward/") && !["reward/std"].includes(name));
    if (parts.length) found.splice(Math.min(2, found.length), 0, ["Other rewards", parts]);
    parts.forEach((name) => left.delete(name));
    return [found, [...left].sort().map((name) => [name, [name]])];
  };

  // Two runs have other steps: their columns are joined on the axis, with gaps that are bridged.
  const table = (one, other, axis, names) => {
    const of = (metrics) => [metrics[axis] ?? [], ...names.map((name) => metrics[name] ?? Array((metrics[axis] ?? []).length).fill(null))];
    const clean = (data) => {
      const keep = data[0].map((value, index) => [value, index]).filter(([value]) => value !== null).sort((a, b) => a[0] - b[0]);
      return data.map((column) => keep.map(([, index]) => column[index]));
    };
    return other ? uPlot.join([clean(of(one)), clean(of(other))]) : clean(of(one));
  };

  const marks = (alarms, axis, metrics) => alarms.map((alarm) => {
    const place = (metrics.step ?? []).indexOf(alarm.step);
    return axis === "step" ? alarm.step : place < 0 ? null : metrics[axis][place];
  }).filter((place) => place !== null && place !== undefined);

  const markers = (places) => (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = cssColor("--bad");
    ctx.setLineDash([4, 4]);
    for (const place of places) {
      const x = Math.round(chart.valToPos(place, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(x - 6, bbox.top); ctx.lineTo(x + 6, bbox.top); ctx.lineTo(x, bbox.top + 10); ctx.fill();
    }
    ctx.restore();
  };

  const latest = (values) => {
    const there = (values ?? []).filter((value) => value !== null && value !== undefined);
    return there.length ? there[there.length - 1] : null;
  };

  const draw = (into, title, names, [one, other], axis, places) => {
    const data = table(one.metrics, other?.metrics, axis, names);
    const runs = other ? [one, other] : [one];
    // Without a pointer on the chart, the legend has the latest values.
    const value = (digits) => (chart, value, series, index) => {
      const shown = index === null || index === undefined ? latest(chart.data[series]) : value;
      return shown === null || shown === undefined ? "" : number(shown, digits);
    };
    const series = runs.flatMap((run, which) => names.map((name, index) => ({
      label: which ? `${name} of ${run.name}` : name,
      stroke: cssColor(`--c${index % 8}`), width: 1.6, dash: which ? [6, 4] : undefined, spanGaps: true,
      points: { show: data[0].length < 3 || /^(validation|evaluation)\//.test(name), size: 5 },
      value: value(4),
    })));
    const grid = { stroke: cssColor("--quiet"), grid: { stroke: cssColor("--line"), width: 1 }, ticks: { stroke: cssColor("--line"), width: 1 }, font: "12px system-ui" };
    const size = (chart, values) => 22 + 7 * Math.max(3, ...(values ?? []).map((value) => value.length));
    const label = (chart, values) => values.map((value) => number(value, 6));
    const frame = el("div", { role: "img" });
    const tell = (metrics) => {
      const last = names.map((name) => `${name}: ${number(latest(metrics[name]))}`).join(", ");
      frame.setAttribute("aria-label", plaudit.visible(`${title} over ${axis}. Latest: ${last}`));
    };
    tell(one.metrics);
    into.append(el("div", { className: "chart" }, el("h3", {}, title), frame));
    const chart = new uPlot({
      width: Math.max(240, frame.clientWidth), height: 200, series: [{ label: axis, value: value(7) }, ...series],
      scales: { x: { time: false }, y: { range: (chart, low, high) => (low === high ? [low - 1, low + 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
      axes: [{ ...grid, size: 28, values: label, incrs: axis === "time" ? undefined : WHOLE }, { ...grid, size, values: label }],
      cursor: { sync: { key: "plaudit" }, drag: { x: true, y: false } }, hooks: { draw: [markers(places)] },
      legend: { live: true },
    }, data, frame);
    // New steps move a chart only if all of it is seen: one that was zoomed stays where it is.
    const fill = (metrics, theirs) => {
      const [steps, { min, max }] = [chart.data[0], chart.scales.x];
      chart.setData(table(metrics, theirs, axis, names), min <= steps[0] && max >= steps[steps.length - 1]);
      if (chart.cursor.idx === null || chart.cursor.idx === undefined) chart.setLegend({ idx: null });
      tell(metrics);
    };
    drawn.push({ chart, frame, fill });
  };

  addEventListener("resize", () => drawn.forEach(({ chart, frame }) => {
    if (frame.clientWidth) chart.setSize({ width: frame.clientWidth, height: 200 });
  }));

  const found = async () => {
    const { run, with: beside } = plaudit.state;
    return Promise.all([ask("metrics", { run }), ask("health", { run }), beside ? ask("metrics", { run: beside }) : null]);
  };

  const shaped = (metrics, health, theirs) => JSON.stringify([plaudit.state, health.length, Object.keys({ ...metrics, ...theirs })]);

  plaudit.views.curves = {
    title: "Curves",
    async show(into) {
      const mine = ++plaudit.turn;
      const { run, axis = "step", with: beside } = plaudit.state;
      const [metrics, health, theirs] = await found();
      const other = theirs ? { name: beside, metrics: theirs } : null;
      if (mine !== plaudit.turn) return;
      drawn.forEach(({ chart }) => chart.destroy());
      drawn = [];
      shape = shaped(metrics, health, theirs);
      into.replaceChildren();
      if (!metrics || !(metrics.step ?? []).length) {
        into.append(el("p", {}, "No step has been recorded yet. Figures appear here after the first one."));
        return;
      }
      into.append(el("div", { className: "row" },
        plaudit.select("Over", AXES, axis, (value) => { plaudit.go({ axis: value }); this.show(into); }),
        el("span", { className: "quiet" }, "Drag to zoom, double-click to see all again.")));
      if (health.length) {
        into.append(el("div", { className: "alarms" }, el("h3", {}, `${health.length} alarm${health.length > 1 ? "s" : ""}`),
          el("ul", {}, health.map((alarm) => el("li", {}, el("b", {}, `Step ${alarm.step}, ${alarm.sign}: `), alarm.saw,
            el("div", { className: "quiet" }, alarm.why), el("div", {}, alarm.advice))))));
      }
      const runs = [{ name: run, metrics }, other];
      const places = marks(health, axis, metrics);
      const [known, others] = pictures(Object.keys({ ...metrics, ...(other?.metrics ?? {}) }));
      const charts = el("div", { className: "charts" });
      into.append(charts);
      known.forEach(([title, names]) => draw(charts, title, names, runs, axis, places));
      const more = el("div", { className: "charts" });
      const rest = el("details", { ontoggle: () => {
        if (rest.open && !more.children.length) others.forEach(([title, names]) => draw(more, title, names, runs, axis, places));
      } }, el("summary", {}, `${others.length} further figures`), more);
      if (others.length) into.append(rest);
    },
    async refresh(into) {
      const mine = ++plaudit.turn;
      const [metrics, health, theirs] = await found();
      if (mine !== plaudit.turn) return;
      if (!drawn.length || shaped(metrics, health, theirs) !== shape) return this.show(into);
      drawn.forEach(({ fill }) => fill(metrics, theirs));
    },
  };
})();
