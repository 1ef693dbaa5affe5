"use strict";
// The tables and devices of a plan: sorted, filtered, hovered over, and compared to the plan before. It only reads the
// page's own data, and writes text, never markup.
(() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
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
  const ms = (x) => x.toFixed(3);
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

  const columns = [
    ["table", (t) => t.name], ["kinds", (t) => [...new Set(t.is.map((p) => p.kind))].join(" ")],
    ["parts", (t) => t.is.length], ["rows", (t) => t.rows, (x) => x.toLocaleString("en")], ["dim", (t) => t.dim],
    ["lookups", (t) => t.lookups, (x) => x.toFixed(1)], ["bytes", (t) => t.bytes, size], ["is", (t) => where(t.is)],
    ...(data.before ? [["was", (t) => (t.was ? where(t.was) : t.moved ? "not there" : "the same")]] : [])];
  const titles = {lookups: "lookups a sample", bytes: "weights", is: "where", was: `in ${data.before && data.before.version}`};

  function kept() {
    const text = state.text.toLowerCase();
    const found = data.tables.filter((t) => t.name.toLowerCase().includes(text)
      && (!state.kind || t.is.some((p) => p.kind === state.kind))
      && (state.device === null || t.is.some((p) => on(p, state.device)))
      && (!state.moved || t.moved));
    const value = columns.find(([name]) => name === state.sort)[1];
    found.sort((a, b) => {
      const x = value(a), y = value(b);
      const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", {numeric: true});
      return (state.down ? -order : order) || a.name.localeCompare(b.name, "en", {numeric: true});
    });
    return found;
  }

  function showTables() {
    const found = kept(), head = byId("tables-head"), body = byId("tables-body");
    head.replaceChildren();
    for (const [name] of columns) {
      const cell = made("th", (titles[name] || name) + (state.sort === name ? (state.down ? " ▾" : " ▴") : ""), head);
      cell.tabIndex = 0;
      cell.dataset.column = name;
      cell.onclick = () => {
        state.down = state.sort === name ? !state.down : !["table", "kinds", "is", "was"].includes(name);
        state.sort = name;
        showTables();
      };
      cell.onkeydown = (event) => { if (event.key === "Enter") cell.onclick(); };
    }
    body.replaceChildren();
    for (const table of found.slice(0, MOST_ROWS)) {
      const row = made("tr", "", body);
      if (table.moved) row.className = "moved";
      for (const [, value, shown] of columns) made("td", shown ? shown(value(table)) : value(table), row);
    }
    const rest = found.length > MOST_ROWS ? `; the first ${MOST_ROWS} are shown` : "";
    const device = state.device === null ? "" : ` on device ${state.device}`;
    byId("tables-count").textContent = `${found.length} of ${data.tables.length} tables${device}${rest}`;
  }

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

  function showDevices() {
    const svg = byId("devices"), n = data.devices.length;
    const before = data.before ? data.before.devices : [];
    const most = Math.max(...[...data.devices, ...before].map((d) => sum(d.ms)), 1e-9);
    svg.setAttribute("viewBox", `0 0 1000 ${HEIGHT + 4}`);
    const step = 1000 / n, gap = Math.min(4, step / 5);
    data.devices.forEach((device, i) => {
      const bar = drawn("g", {"data-device": i, tabindex: 0}, svg);
      let top = HEIGHT;
      device.ms.forEach((part, k) => {
        const height = part / most * HEIGHT;
        top -= height;
        drawn("rect", {x: i * step, y: top, width: step - gap, height, fill: data.parts[k][1]}, bar);
      });
      if (before[i]) {
        const y = HEIGHT * (1 - sum(before[i].ms) / most);
        drawn("rect", {x: i * step, y: y - 1, width: step - gap, height: 2, fill: "#222", class: "was"}, bar);
      }
      drawn("rect", {x: i * step, y: 0, width: step, height: HEIGHT, fill: "transparent"}, bar);
      bar.onmouseenter = bar.onfocus = () => showDevice(i);
      bar.onclick = () => {
        state.device = state.device === i ? null : i;
        for (const other of svg.children) {
          other.setAttribute("class", state.device !== null && +other.dataset.device !== state.device ? "dim" : "");
        }
        showTables();
      };
      bar.onkeydown = (event) => { if (event.key === "Enter") bar.onclick(); };
    });
  }

  const kinds = byId("kind");
  for (const kind of ["", ...new Set(data.tables.flatMap((t) => t.is.map((p) => p.kind)))].sort()) {
    made("option", kind || "every kind", kinds).value = kind;
  }
  kinds.onchange = () => { state.kind = kinds.value; showTables(); };
  byId("filter").oninput = (event) => { state.text = event.target.value; showTables(); };
  if (data.before) byId("moved").onchange = (event) => { state.moved = event.target.checked; showTables(); };
  showDevices();
  showTables();
})();
