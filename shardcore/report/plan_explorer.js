"use strict";
// The tables and devices of a plan: sorted, filtered, hovered over, compared to the plan before, and what moves of single
// shards do. It only reads the page's own data, and writes text, never markup.
(() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent), priced = data.what_if;
  const MOST_ROWS = 500, HEIGHT = 150, SVG = "http://www.w3.org/2000/svg";
  const state = {sort: "bytes", down: true, text: "", kind: "", device: null, moved: false};
  const byId = (id) => document.getElementById(id);
  const made = (tag, text, parent) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const drawn = (tag, attributes, parent) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  };
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const ms = (x) => x.toFixed(3);
  const percent = (x) => Math.abs(x) < 5e-5 ? "no change" : `${x < 0 ? "−" : "+"}${Math.abs(100 * x).toFixed(Math.abs(x) < 0.01 ? 2 : 1)}%`;
  const size = (bytes) => {
    const [unit, name] = bytes >= 0.1 * 2 ** 30 ? [2 ** 30, "GiB"] : bytes >= 0.1 * 2 ** 20 ? [2 ** 20, "MiB"] : [1, "bytes"];
    return unit > 1 ? `${(bytes / unit).toFixed(2)} ${name}` : `${bytes.toLocaleString("en")} bytes`;
  };
  const all = (devices) => devices === null;
  const on = (devices, device) => devices && (all(devices.on) || devices.on.includes(device));
  const where = (places) => places.map((p) => {
    const columns = p.columns[1] - p.columns[0] < p.dim ? `, columns ${p.columns[0]}:${p.columns[1]} of ${p.dim}` : "";
    const few = (on) => on.slice(0, 8).join(", ") + (on.length > 8 ? ` and ${on.length - 8} more` : "");
    const shown = all(p.on) ? "all devices" : `device${p.on.length > 1 ? "s" : ""} ${few(p.on)}`;
    return `${p.kind} on ${shown}${columns}`;
  }).join("; ");

  // --- what a move does: each as the library has priced it ----------------------------------------------------------

  const moves = priced ? priced.moves.map(([table, lo, hi, from, to, total_ms, refused, changed, last]) =>
    ({table, lo, hi, from, to, total_ms, refused, changed, last})) : [];
  const step_ms = data.total_ms;
  const change = (move) => percent(move.total_ms / step_ms - 1);
  const part = (move) => {
    const table = data.tables[move.table];
    return move.hi - move.lo < table.dim ? `columns ${move.lo}:${move.hi} of ${table.name}` : table.name;
  };
  const says = (move) => `${part(move)}: device ${move.from} to ${move.to}, ${change(move)}${move.refused ? ", does not fit" : ""}`;

  function say(text) { byId("what-if-says").textContent = text; byId("what-if-rows").replaceChildren(); }

  // The moves of a table, or the best of all, where none is chosen.
  function choose(table) {
    const shown = table === null ? priced.best : moves.map((_, k) => k).filter((k) => moves[k].table === table);
    const select = byId("what-if-move");
    select.replaceChildren();
    for (const k of shown) made("option", says(moves[k]), select).value = k;
    select.disabled = !shown.length;
    byId("what-if-table").textContent = table === null ? "the best moves" : data.tables[table].name;
    if (table === null) {
      select.value = "";
      return say("");
    }
    if (shown.length) return showMove(shown[0]);
    const {name, is} = data.tables[table], kinds = [...new Set(is.map((p) => p.kind))].join(", ");
    say(`${name} cannot move: ${priced.stays[table] || (is.some((p) => all(p.on) || p.on.length > 1)
      ? `it is on several devices (${kinds}), which share its exchanges` : "no other device may have it")}.`);
  }

  function showMove(k) {
    const move = moves[k];
    say(`With ${part(move)} on device ${move.to} instead of ${move.from}, a step takes ${ms(move.total_ms)} ms instead of `
      + `${ms(step_ms)}: ${change(move)}. ${move.refused ? `It does not fit: ${move.refused}.` : "It fits."}`);
    for (const [d, busy_ms, used] of move.changed) {
      const row = made("tr", "", byId("what-if-rows")), device = data.devices[d];
      const role = [d === move.from && "from", d === move.to && "to", d === data.bottleneck && "ready last before",
        d === move.last && "ready last after"].filter(Boolean).join(", ");
      for (const cell of [`device ${d}: ${role}`, ms(device.busy_ms), ms(busy_ms), size(device.used), size(used), size(device.free)]) {
        made("td", cell, row);
      }
    }
  }

  // --- tables -----------------------------------------------------------------------------------------------------

  const columns = [
    ["table", (t) => t.name], ["kinds", (t) => [...new Set(t.is.map((p) => p.kind))].join(" ")],
    ["parts", (t) => t.is.length], ["rows", (t) => t.rows, (x) => x.toLocaleString("en")], ["dim", (t) => t.dim],
    ["lookups", (t) => t.lookups, (x) => x.toFixed(1)], ["bytes", (t) => t.bytes, size], ["is", (t) => where(t.is)],
    ...(data.before ? [["was", (t) => (t.was ? where(t.was) : t.moved ? "not there" : "the same")]] : [])];
  const titles = {lookups: "lookups a sample", bytes: "weights", is: "where", was: `in ${data.before && data.before.version}`};
  const byName = new Intl.Collator("en", {numeric: true}).compare;
  data.tables.forEach((t, i) => { t.number = i; });

  function kept() {
    const text = state.text.toLowerCase();
    const found = data.tables.filter((t) => t.name.toLowerCase().includes(text)
      && (!state.kind || t.is.some((p) => p.kind === state.kind))
      && (state.device === null || t.is.some((p) => on(p, state.device)))
      && (!state.moved || t.moved));
    const value = columns.find(([name]) => name === state.sort)[1];
    return found.map((t) => [value(t), t]).sort(([x, a], [y, b]) => {
      const order = typeof x === "number" ? x - y : byName(x, y);
      return (state.down ? -order : order) || byName(a.name, b.name);
    }).map(([, t]) => t);
  }

  // Arrow keys go from one element to the next of its kind, of which the tab key stops at one.
  function walk(event, back, on) {
    const at = event.target, to = {[back]: at.previousElementSibling, [on]: at.nextElementSibling,
      Home: at.parentNode.firstElementChild, End: at.parentNode.lastElementChild}[event.key];
    if (event.key === "Enter" || event.key === " ") at.dispatchEvent(new MouseEvent("click", {bubbles: true}));
    else if (!to) return;
    else {
      at.setAttribute("tabindex", -1);
      to.setAttribute("tabindex", 0);
      to.focus();
    }
    event.preventDefault();
  }

  function showHead() {
    const head = byId("tables-head");
    for (const [name] of columns) {
      const cell = made("th", "", head);
      cell.tabIndex = 0;
      cell.dataset.column = name;
      cell.onclick = () => {
        state.down = state.sort === name ? !state.down : !["table", "kinds", "is", "was"].includes(name);
        state.sort = name;
        showTables();
      };
      cell.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); cell.onclick(); } };
    }
  }

  function showTables() {
    const found = kept(), body = byId("tables-body");
    for (const cell of byId("tables-head").children) {
      const name = cell.dataset.column, sorted = state.sort === name;
      cell.textContent = (titles[name] || name) + (sorted ? (state.down ? " ▾" : " ▴") : "");
      cell.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    }
    body.replaceChildren(...found.slice(0, MOST_ROWS).map((table, i) => {
      const row = made("tr", "");
      row.tabIndex = i ? -1 : 0;
      row.dataset.table = table.number;
      if (table.moved) row.className = "moved";
      for (const [, value, shown] of columns) made("td", shown ? shown(value(table)) : value(table), row);
      return row;
    }));
    const rest = found.length > MOST_ROWS ? `; the first ${MOST_ROWS} are shown` : "";
    const device = state.device === null ? "" : ` on device ${state.device}`;
    byId("tables-count").textContent = `${found.length} of ${data.tables.length} tables${device}${rest}`;
  }

  // --- devices ----------------------------------------------------------------------------------------------------

  function showDevice(device) {
    const panel = byId("device"), its = data.devices[device];
    panel.replaceChildren();
    const was = data.before && data.before.devices[device];
    made("b", `Device ${device}, ${its.host}: ${ms(sum(its.ms))} ms${was ? ` (was ${ms(sum(was.ms))})` : ""}, `
      + `${size(its.used)} of ${size(its.free)}${was ? ` (was ${size(was.used)})` : ""}`, panel);
    made("div", data.parts.map(([name], i) => `${name} ${ms(its.ms[i])}`).join(", "), panel);
    const tables = data.tables.filter((t) => t.is.some((p) => on(p, device)));
    const shown = [...tables].sort((a, b) => b.bytes - a.bytes).slice(0, 12).map((t) => t.name).join(", ");
    made("div", `${tables.length} tables: ${shown}${tables.length > 12 ? ", ..." : ""}`, panel);
  }

  // Heights, of parts from below, and levels of lines: of each device.
  function bars(svg, heights, colors, lines) {
    const n = heights.length, focused = [...svg.children].indexOf(document.activeElement);
    const highest = Math.max(most(heights.map((of) => sum(of.slice(0, colors.length)))), most(lines.flat()), 1e-9);
    const step = 1000 / n, gap = Math.min(4, step / 5);
    svg.setAttribute("viewBox", `0 0 1000 ${HEIGHT + 4}`);
    svg.replaceChildren();
    heights.forEach((of, i) => {
      const bar = drawn("g", {"data-device": i, tabindex: i === Math.max(focused, 0) ? 0 : -1, role: "button",
        "aria-label": `device ${i}`}, svg);
      if (state.device !== null && state.device !== i) bar.setAttribute("class", "dim");
      let top = HEIGHT;
      of.forEach((part, k) => {
        const height = part / highest * HEIGHT;
        top -= height;
        drawn("rect", {x: i * step, y: top, width: step - gap, height, class: colors[k]}, bar);
      });
      for (const level of lines[i]) {
        drawn("rect", {x: i * step, y: HEIGHT * (1 - level / highest) - 1, width: step - gap, height: 2, class: "was"}, bar);
      }
      drawn("rect", {x: i * step, y: 0, width: step, height: HEIGHT, fill: "transparent"}, bar);
      bar.onmouseenter = bar.onfocus = () => showDevice(i);
      bar.onclick = () => {
        state.device = state.device === i ? null : i;
        showDevices();
        showTables();
      };
      bar.onkeydown = (event) => walk(event, "ArrowLeft", "ArrowRight");
    });
    if (focused >= 0) svg.children[focused].focus();
  }

  function showDevices() {
    const before = data.before ? data.before.devices : [];
    const lines = (value) => data.devices.map((_, d) => (before[d] ? [value(before[d])] : []));
    bars(byId("devices"), data.devices.map((d) => d.ms), data.parts.map((_, k) => `part-${k}`), lines((d) => sum(d.ms)));
    bars(byId("memory"), data.devices.map((d) => [d.used, Math.max(0, d.free - d.used)]), ["used", "free"], lines((d) => d.used));
  }

  const kinds = byId("kind");
  for (const kind of ["", ...new Set(data.tables.flatMap((t) => t.is.map((p) => p.kind)))].sort()) {
    made("option", kind || "every kind", kinds).value = kind;
  }
  kinds.onchange = () => { state.kind = kinds.value; showTables(); };
  byId("filter").oninput = (event) => { state.text = event.target.value; showTables(); };
  if (data.before) byId("moved").onchange = (event) => { state.moved = event.target.checked; showTables(); };
  byId("tables-body").onkeydown = (event) => { if (event.target.tagName === "TR") walk(event, "ArrowUp", "ArrowDown"); };
  if (priced) {
    byId("tables-body").onclick = (event) => {
      const row = event.target.closest("tr");
      if (row) choose(+row.dataset.table);
    };
    byId("what-if-move").onchange = (event) => showMove(+event.target.value);
    byId("what-if-back").onclick = () => choose(null);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") choose(null); });
    choose(null);
  }
  byId("theme").onclick = () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  };
  showHead();
  showDevices();
  showTables();
})();
