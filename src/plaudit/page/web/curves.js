// Curves over steps, time or tokens: one picture for figures that belong together, alarms as marks on all. Of several
// runs each has a colour, and each figure of a picture its dashes.
"use strict";

(() => {
  const { el, ask, number, cssColor, colour } = plaudit;
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
  const DASHES = [[], [7, 4], [2, 3], [11, 3, 2, 3], [16, 5], [2, 7]];
  const FEW = /^(validation|evaluation)\//; // figures that few steps have
  const POINTS = 24000; // of all runs of a picture
  const FAINT = 0.25;
  let drawn = []; // { chart, frame, fill, light, reach }
  let shape = "";
  let held = false;

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

  // A picture says nothing if its figures are zero but for rounding, or those of a picture above it.
  const telling = (found, runs) => {
    const there = (value) => value !== null && value !== undefined;
    const zero = (name) => runs.every(({ metrics }) => (metrics[name] ?? []).every((value) => !there(value) || Math.abs(value) < 1e-9));
    const equal = (one, other) => one === other || (there(one) && there(other) && Math.abs(one - other) <= 1e-6 * Math.max(Math.abs(one), Math.abs(other)));
    const same = (name, other) => runs.every(({ metrics }) => {
      const [a, b] = [metrics[name] ?? [], metrics[other] ?? []];
      return a.length === b.length && a.every((value, index) => equal(value, b[index]));
    });
    const seen = [];
    return found.filter(([, names]) => {
      if (names.every((name) => zero(name) || seen.some((other) => same(name, other)))) return false;
      seen.push(...names);
      return true;
    });
  };

  // A running mean that forgets; the division lets it begin at the first value instead of at 0 (as TensorBoard's).
  const smoothed = (values, weight) => {
    let [sum, norm] = [0, 0];
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      [sum, norm] = [weight * sum + (1 - weight) * value, weight * norm + (1 - weight)];
      return sum / norm;
    });
  };

  // A run's figures over the axis, in its order, at most `most` points and all of the figures that few steps have.
  const table = (metrics, axis, names, most, weight) => {
    const over = metrics[axis] ?? [];
    const found = names.map((name) => metrics[name] ?? Array(over.length).fill(null));
    const keep = over.map((value, index) => [value, index]).filter(([value, index]) => value !== null && found.some((column) => column[index] !== null)).sort((a, b) => a[0] - b[0]);
    const every = Math.ceil(keep.length / most);
    const few = found.filter((_, index) => FEW.test(names[index]));
    const thin = (place, index) => index % every === 0 || index === keep.length - 1 || few.some((column) => column[place[1]] !== null);
    const smooth = weight ? found.map((column) => smoothed(keep.map(([, index]) => column[index]), weight)) : [];
    const rows = keep.map((place, index) => [...place, index]).filter(thin);
    return [rows.map(([value]) => value), ...found.map((column) => rows.map(([, index]) => column[index])),
      ...smooth.map((column) => rows.map(([, , index]) => column[index]))];
  };

  const joined = (runs, axis, names, weight) => {
    const tables = runs.map(({ metrics }) => table(metrics, axis, names, Math.max(300, POINTS / runs.length), weight));
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  };

  // From a step to its place on the axis.
  plaudit.along = (axis, metrics) => (step) => {
    if (axis === "step") return step;
    const steps = metrics.step ?? [];
    const next = steps.findIndex((one) => one >= step);
    return steps.length ? (metrics[axis] ?? [])[next < 0 ? steps.length - 1 : next] ?? null : null;
  };

  const marks = (alarms, axis, metrics) => {
    const at = plaudit.along(axis, metrics);
    return alarms.map(({ step, last }) => [at(step), at(last)]).filter(([from]) => from !== null && from !== undefined);
  };

  const markers = (places) => (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left - 6, bbox.top, bbox.width + 12, bbox.height); ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = cssColor("--bad");
    ctx.setLineDash([4, 4]);
    for (const [from, to] of places) {
      const [x, end] = [from, to ?? from].map((place) => Math.round(chart.valToPos(place, "x", true)));
      if (end < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.globalAlpha = 0.08; ctx.fillRect(x, bbox.top, end - x, bbox.height); ctx.globalAlpha = 1;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(x - 6, bbox.top); ctx.lineTo(x + 6, bbox.top); ctx.lineTo(x, bbox.top + 10); ctx.fill();
    }
    ctx.restore();
  };

  const latest = (values) => (values ?? []).findLast((value) => value !== null && value !== undefined) ?? null;
  // Where several runs have other steps, each has the value of its step at or before the pointer; none after its end.
  const before = (values, index) => {
    if (index === null || index === undefined) return latest(values);
    const there = (place) => values[place] !== null && values[place] !== undefined;
    let later = index;
    while (later < values.length && !there(later)) later += 1;
    if (later === values.length) return null;
    while (index >= 0 && !there(index)) index -= 1;
    return values[index] ?? null;
  };

  const line = (stroke, dashes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of [["class", "line"], ["viewBox", "0 0 34 6"], ["aria-hidden", "true"]]) made.setAttribute(name, value);
    const path = made.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    for (const [name, value] of [["d", "M0 3H34"], ["stroke-dasharray", dashes.join(" ") || "none"]]) path.setAttribute(name, value);
    path.style.stroke = stroke;
    return made;
  };

  // What the lines are, with their values at the pointer, or the latest: a row for each figure, or for each run and a
  // column for each figure.
  const legend = (runs, names, axis, weight, stroke) => {
    const cells = runs.map(() => names.map(() => el("td", { className: "u-value" })));
    const over = el("th", { scope: "col" });
    const rows = runs.map(({ name }, run) => (runs.length > 1
      ? el("tr", { onmouseenter: () => plaudit.highlight(name), onmouseleave: () => plaudit.highlight(null) },
        el("th", { scope: "row" }, plaudit.swatch(name), name), cells[run])
      : names.map((figure, index) => el("tr", {}, el("th", { scope: "row" }, line(stroke(0, index), DASHES[index % 6]), figure), cells[0][index]))));
    const columns = runs.length > 1 ? names.map((figure, index) => el("th", { scope: "col" }, names.length > 1 ? line("currentColor", DASHES[index % 6]) : null, figure)) : el("th", { scope: "col" }, weight ? "smoothed (value)" : "value");
    const made = el("div", { className: "legend scroll", role: "group", "aria-label": "Values" },
      el("table", {}, el("thead", {}, el("tr", {}, over, columns)), el("tbody", {}, rows.flat())));
    const fill = (chart) => {
      const index = chart.cursor.idx;
      const pointed = index !== null && index !== undefined;
      over.textContent = pointed ? `${axis} ${number(chart.data[0][index], 7)}` : `latest ${axis} ${number(latest(chart.data[0]), 7)}`;
      let [near, distance] = [-1, 24];
      runs.forEach((_, run) => names.forEach((_, figure) => {
        const raw = 1 + run * names.length * (weight ? 2 : 1) + figure;
        const values = [raw, ...(weight ? [raw + names.length] : [])].map((one) => before(chart.data[one] ?? [], index));
        const cell = cells[run][figure];
        cell.textContent = values[0] === null ? "" : weight ? `${number(values[1])} (${number(values[0])})` : number(values[0]);
        const away = pointed && values[0] !== null && chart.root.matches(":hover") ? Math.abs(chart.valToPos(values[values.length - 1], "y") - chart.cursor.top) : 99;
        if (away < distance) [near, distance] = [run, away];
      }));
      if (runs.length > 1) rows.forEach((row, run) => row.classList.toggle("near", run === near));
    };
    return [made, fill];
  };

  const grid = () => ({ stroke: cssColor("--quiet"), grid: { stroke: cssColor("--line"), width: 1 }, ticks: { stroke: cssColor("--line"), width: 1 }, font: "12px system-ui" });
  plaudit.axes = (axis) => {
    const size = (chart, values) => 22 + 7 * Math.max(3, ...(values ?? []).map((value) => value.length));
    const label = (chart, values) => values.map((value) => number(value, 6));
    return [{ ...grid(), size: 28, values: label, incrs: axis === "time" ? undefined : WHOLE }, { ...grid(), size, values: label }];
  };
  plaudit.drawn = (one) => drawn.push({ light: () => {}, fill: () => {}, reach: () => {}, ...one });

  const draw = (into, title, names, runs, axis, weight, places) => {
    const data = joined(runs, axis, names, weight);
    const stroke = (run, figure, resolve) => colour(runs.length > 1 ? plaudit.placed(runs[run].name) : figure, resolve);
    const series = runs.flatMap((run, which) => [false, true].slice(0, weight ? 2 : 1).flatMap((smooth) => names.map((name, index) => ({
      label: name, stroke: stroke(which, index, true), width: weight && !smooth ? 1 : 1.7, alpha: weight && !smooth ? FAINT : 1,
      dash: weight && !smooth ? [] : DASHES[index % 6], spanGaps: true,
      points: { show: (!weight || smooth) && (data[0].length < 3 || FEW.test(name)), size: 5 },
    }))));
    const frame = el("div", { role: "img" });
    const [told, fillLegend] = legend(runs, names, axis, weight, stroke);
    const tell = () => {
      const last = runs.slice(0, 8).map(({ name, metrics }) => (runs.length > 1 ? `${name}: ` : "") + names.map((figure) => `${figure}: ${number(latest(metrics[figure]))}`).join(", ")).join("; ");
      frame.setAttribute("aria-label", plaudit.visible(`${title} over ${axis}. Latest: ${last}`));
    };
    tell();
    into.append(el("div", { className: "chart" }, el("h3", {}, title), frame, told));
    const chart = new uPlot({
      width: Math.max(240, frame.clientWidth), height: 200, series: [{ label: axis }, ...series],
      scales: { x: { time: false }, y: { range: (chart, low, high) => (low === null ? [0, 1] : low === high ? [low - (Math.abs(low) || 1), low + (Math.abs(low) || 1)] : uPlot.rangeNum(low, high, 0.1, true)) } },
      axes: plaudit.axes(axis), legend: { show: false },
      cursor: { sync: { key: "plaudit" }, drag: { x: true, y: false } }, hooks: { draw: [markers(places)], setCursor: [fillLegend] },
    }, data, frame);
    fillLegend(chart);
    const reach = () => { if (told.scrollWidth > told.clientWidth || told.scrollHeight > told.clientHeight) told.tabIndex = 0; }; // keys scroll it
    reach();
    // New steps move a chart only if all of it is seen: one that was zoomed stays where it is.
    const fill = (found) => {
      const [steps, { min, max }] = [chart.data[0], chart.scales.x];
      runs = found;
      chart.setData(joined(runs, axis, names, weight), min <= steps[0] && max >= steps[steps.length - 1]);
      fillLegend(chart);
      reach();
      tell();
    };
    const light = (name) => {
      const each = names.length * (weight ? 2 : 1);
      runs.forEach((run, which) => Array.from({ length: each }, (_, index) => {
        const raw = weight && index < names.length;
        chart.series[1 + which * each + index].alpha = name === null || run.name === name ? (raw ? FAINT : 1) : 0.08;
      }));
      chart.redraw(false, false);
    };
    plaudit.drawn({ chart, frame, fill, light, reach });
  };

  // Draws one run's curves before the others', in all pictures.
  plaudit.highlight = (name) => { if (plaudit.shown().length > 1) drawn.forEach(({ light }) => light(name)); };

  addEventListener("resize", () => drawn.forEach(({ chart, frame, reach }) => {
    if (!frame.clientWidth) return;
    chart.setSize({ width: frame.clientWidth, height: 200 });
    reach();
  }));

  const found = async () => {
    const names = plaudit.shown();
    const [health, ...metrics] = await Promise.all([ask("health", { run: names[0] }), ...names.map((run) => ask("metrics", { run }))]);
    return [names.map((name, index) => ({ name, metrics: metrics[index] ?? {} })), health ?? []];
  };

  // The pictures of runs: those that are drawn at once, those on demand, and how many have nothing to say.
  const chosen = (runs) => {
    const [known, others] = pictures([...new Set(runs.flatMap(({ metrics }) => Object.keys(metrics)))]);
    const kept = new Set(telling([...known, ...others], runs));
    const all = plaudit.state.all;
    return { known: known.filter((one) => all || kept.has(one)), others: others.filter((one) => all || kept.has(one)), hidden: known.length + others.length - kept.size };
  };

  const shaped = (runs, health) => {
    const { known, others } = chosen(runs);
    return JSON.stringify([plaudit.state, health.length, health.map(({ last }) => last), known, others]);
  };

  plaudit.views.curves = {
    title: "Curves",
    async show(into) {
      const mine = ++plaudit.turn;
      const { axis = "step" } = plaudit.state;
      const weight = Math.min(0.99, Math.max(0, Number(plaudit.state.smooth) || 0));
      const [runs, health] = await found();
      if (mine !== plaudit.turn) return;
      drawn.forEach(({ chart }) => chart.destroy());
      drawn = [];
      shape = shaped(runs, health);
      into.replaceChildren();
      if (!runs.some(({ metrics }) => (metrics.step ?? []).length)) {
        into.append(el("p", {}, "No step has been recorded yet. Figures appear here after the first one."));
        return;
      }
      const { known, others, hidden } = chosen(runs);
      const again = (changes) => { plaudit.go(changes); return this.show(into); };
      const smooth = el("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: weight, onchange: (event) => {
        held = document.activeElement === smooth;
        again({ smooth: Number(event.target.value) || "" }).catch((error) => plaudit.tell(error.message));
      } });
      into.append(el("div", { className: "row" },
        plaudit.select("Over", AXES, axis, (value) => again({ axis: value })),
        el("label", {}, weight ? `Smoothing: ${weight}` : "Smoothing: none", smooth),
        hidden ? el("button", { title: "Only zeros, or the values of a picture above", onclick: () => again({ all: plaudit.state.all ? "" : 1 }) },
          `${hidden} panel${hidden > 1 ? "s" : ""} without content: ${plaudit.state.all ? "hide" : "show"}`) : "",
        el("span", { className: "quiet" }, "Drag to zoom, double-click to see all again.")));
      if (held) smooth.focus(); // keys go on moving it
      held = false;
      const raised = plaudit.alarms(into, health);
      const places = marks(raised, axis, runs[0].metrics);
      const charts = el("div", { className: "charts" });
      into.append(charts);
      const heat = plaudit.chosen()?.answers ? el("div", { className: "chart", hidden: true }) : null;
      known.forEach(([title, names], index) => {
        draw(charts, title, names, runs, axis, weight, places);
        if (heat && index === 0) charts.append(heat);
      });
      const more = el("div", { className: "charts" });
      const rest = el("details", { ontoggle: () => {
        if (rest.open && !more.children.length) others.forEach(([title, names]) => draw(more, title, names, runs, axis, weight, places));
      } }, el("summary", {}, `${others.length} further figure${others.length > 1 ? "s" : ""}`), more);
      if (others.length) into.append(rest);
      if (heat) await plaudit.heat(heat, runs[0], axis);
    },
    async refresh(into) {
      const mine = ++plaudit.turn;
      const [runs, health] = await found();
      if (mine !== plaudit.turn) return;
      if (!drawn.length || shaped(runs, health) !== shape) return this.show(into);
      drawn.forEach(({ fill }) => fill(runs));
    },
  };
})();
