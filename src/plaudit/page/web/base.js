// What all views use: questions to the server, elements with text, numbers, the state in the address.
// Every text of a run goes through `el` into a text node; nothing is ever read as HTML.
"use strict";

// `turn` counts what was asked to be shown: a view that finds another number after waiting leaves the page alone.
const plaudit = { views: {}, state: {}, turn: 0 };

(() => {
  const carried = document.getElementById("carried");
  plaudit.carried = carried ? JSON.parse(carried.textContent) : null; // an exported page has its data with it

  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
  plaudit.visible = (text) =>
    String(text).replace(HIDDEN, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));

  plaudit.el = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name in made && name !== "list") made[name] = value;
      else made.setAttribute(name, value);
    }
    for (const child of children.flat()) {
      if (child === null || child === undefined) continue;
      made.append(child instanceof Node ? child : document.createTextNode(plaudit.visible(child)));
    }
    return made;
  };

  plaudit.number = (value, digits = 4) => {
    if (value === null || value === undefined) return "none";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size >= 1e6 || (size < 1e-3 && size > 0) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
  };

  plaudit.duration = (seconds) => {
    const all = Math.max(0, Math.round(seconds));
    const parts = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
    return parts[0] ? `${parts[0]}:${String(parts[1]).padStart(2, "0")}:${String(parts[2]).padStart(2, "0")}`
      : `${parts[1]}:${String(parts[2]).padStart(2, "0")}`;
  };

  plaudit.select = (label, choices, value, changed) => {
    const options = choices.map(([name, text]) => plaudit.el("option", { value: name, selected: name === value }, text));
    return plaudit.el("label", {}, label, plaudit.el("select", { onchange: (event) => changed(event.target.value) }, options));
  };

  plaudit.cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The address: #run=NAME&tab=answers&step=3. A token comes once in it, and is kept for this tab only.
  const read = new URLSearchParams(plaudit.carried ? plaudit.carried.state : location.hash.slice(1));
  if (read.get("token")) {
    sessionStorage.setItem("plaudit-token", read.get("token"));
    read.delete("token");
    history.replaceState(null, "", "#" + read);
  }
  plaudit.state = Object.fromEntries(read);
  plaudit.go = (changes) => {
    Object.assign(plaudit.state, changes);
    const kept = Object.entries(plaudit.state).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    plaudit.state = Object.fromEntries(kept);
    if (!plaudit.carried) history.replaceState(null, "", "#" + new URLSearchParams(plaudit.state));
  };

  // Runs that are compared have places, which give them their colours: with=A,,C. The open run is one of them.
  const unescaped = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const places = () => {
    const found = (plaudit.state.with ?? "").split(",").map(unescaped);
    const { run } = plaudit.state;
    return found.includes(run) ? found : found.some(Boolean) ? [run, ...found.filter(Boolean)] : [run];
  };
  const place = (run, found) => {
    while (found.length && !found[found.length - 1]) found.pop();
    plaudit.go({ run, with: found.filter(Boolean).length > 1 ? found.map(encodeURIComponent).join(",") : "" });
  };
  plaudit.known = () => true; // main.js knows which runs there are
  plaudit.shown = () => [plaudit.state.run, ...places().filter((name) => name && name !== plaudit.state.run && plaudit.known(name))];
  // A run that is opened takes the place of the one it follows, unless it has one.
  plaudit.open = (name) => {
    const found = places();
    if (!found.includes(name)) found[found.indexOf(plaudit.state.run)] = name;
    place(name, found);
  };
  plaudit.compare = (name, wanted) => {
    const found = places();
    if (!wanted) found[found.indexOf(name)] = "";
    else if (!found.includes(name)) found[found.includes("") ? found.indexOf("") : found.length] = name;
    place(plaudit.state.run, found);
  };
  plaudit.alone = () => place(plaudit.state.run, [plaudit.state.run]);

  // Eight colours that the colour-blind tell apart, then one hue after the other, each once.
  plaudit.colour = (number, resolve = false) => {
    if (number < 8) return resolve ? plaudit.cssColor(`--c${number}`) : `var(--c${number})`;
    return `hsl(${Math.round(number * 137.5) % 360} 60% ${resolve ? plaudit.cssColor("--lightness") : "var(--lightness)"})`;
  };
  plaudit.placed = (name) => Math.max(0, places().indexOf(name));
  plaudit.swatch = (name) => {
    const made = plaudit.el("i", { className: "swatch" });
    made.style.background = plaudit.colour(plaudit.placed(name));
    return made;
  };

  const problem = document.getElementById("problem");
  plaudit.tell = (text) => {
    problem.hidden = !text;
    problem.textContent = text ? plaudit.visible(text) : "";
  };

  plaudit.ask = async (what, given = {}) => {
    const kept = Object.entries(given).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    const pairs = kept.map(([name, value]) => [name, String(value)]).sort();
    if (plaudit.carried) return plaudit.carried.answers[JSON.stringify([what, ...pairs])] ?? null;
    const query = new URLSearchParams(pairs);
    const token = sessionStorage.getItem("plaudit-token");
    const response = await fetch(`api/${what}?${query}`, token ? { headers: { authorization: `Bearer ${token}` } } : {});
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  };
})();
