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
