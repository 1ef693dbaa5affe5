"use strict";
// The tables and devices of a plan: sorted, filtered, hovered over, compared to the plan before, and what the move of
// one shard would do. It only reads the page's own data, and writes text, never markup.
(() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent), law = data.what_if;
  const MOST_ROWS = 500, HEIGHT = 150, SVG = "http://www.w3.org/2000/svg";
  const state = {sort: "bytes", down: true, text: "", kind: "", device: null, moved: false, shard: null, to: null};
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

  // --- what a move would do: the formulas of shardcore/plans/what_if.py -------------------------------------------

  const shards = law ? law.shards.map(([table, device, lo, hi, run, saves, adds, alone, outputs, ids, stays, ...sums]) =>
    ({table, device, lo, hi, run, saves, adds, alone, outputs, ids, stays, sums})) : [];
  const counts = law ? law.pace.map((of, run) => of.map((_, d) => shards.filter((x) => x.run === run && x.device === d).length)) : [];
  // Terms of exchanges: MB of each device, of the busiest, of each host, of the busiest host; and skew in ms.
  const terms = (bytes, compute) => {
    const hosts = bytes.map((of) => of.reduce((sums, x, d) => { sums[law.host[d]] = (sums[law.host[d]] || 0) + x; return sums; }, []));
    const each = (d) => [sum(bytes.map((of) => of[d])), sum(hosts.map((of) => of[law.host[d]]))].map((x) => x / 1e6);
    const busiest = [bytes, hosts].map((runs) => sum(runs.map(most)) / 1e6);
    const skew = Math.min(most(compute) - -most(compute.map((x) => -x)), law.most_skew_ms);
    return compute.map((_, d) => { const [own, host] = each(d); return [own, busiest[0], host, busiest[1], skew]; });
  };
  const was = law && {outputs: terms(law.output_bytes, law.compute_ms), ids: terms(law.id_bytes, law.compute_ms)};

  function whatIf(shard, to) {
    const x = shards[shard], compute = [...law.compute_ms];
    compute[x.device] -= x.saves;
    compute[to] += (counts[x.run][to] ? x.adds * law.pace[x.run][to] : x.alone) / law.speed[to];
    const changed = (bytes, own) => bytes.map((of, run) => run !== x.run ? of
      : of.map((b, d) => b + own * ((d === to) - (d === x.device))));
    const now = {outputs: terms(changed(law.output_bytes, x.outputs), compute), ids: terms(changed(law.id_bytes, x.ids), compute)};
    const added = (which, rates, d) => sum(rates.map((rate, q) => rate * (now[which][d][q] - was[which][d][q])));
    const forward = law.forward_ms.map((t, d) => t + added("outputs", law.forward, d));
    const backward = law.backward_ms.map((t, d) => t + added("outputs", law.backward, d));
    const input = law.input_ms + most(compute.map((_, d) => added("ids", law.ids, d)));
    const ready = compute.map((t, d) => t + backward[d]), last = most(ready);
    // [P] bytes of the shard in each phase, and what limits of its op count.
    const columns = law.coefficients[x.run][0].map((_, p) => sum(x.sums.map((of, f) => of * law.coefficients[x.run][f][p])));
    const memory = law.memory.map((of, d) => of.map((b, p) => b + columns[p] * ((d === to) - (d === x.device))));
    const used = memory.map((of) => most(of.slice(0, law.phases)));
    const fits = data.devices.every((device, d) => used[d] <= device.free)
      && memory.every((of) => of.slice(law.phases).every((n, p) => n <= law.op_limits[p]));
    const fetched = compute.map((t, d) => law.link_ms[d] + (1 - law.forward_share[d]) * t - law.dense_ms);
    return {total_ms: Math.max(last + most(forward), most(fetched)) + input + law.dense_ms, compute, forward, backward,
      waiting: ready.map((t, d) => last - t + Math.max(0, fetched[d] - last - forward[d])), input, used, fits};
  }
  globalThis.whatIf = whatIf;

  const step_ms = most(data.devices.map((d) => sum(d.ms))) + (law ? law.dense_ms : 0);
  const targets = (shard) => {
    const x = shards[shard], taken = shards.filter((y) => y.table === x.table).map((y) => y.device);
    return x.stays ? [] : (law.allowed[x.table] || data.devices.map((_, d) => d)).filter((d) => !taken.includes(d));
  };
  const label = (x) => {
    const table = data.tables[x.table];
    return x.hi - x.lo < table.dim ? `columns ${x.lo}:${x.hi}, on device ${x.device}` : `all of it, on device ${x.device}`;
  };
  const choices = (select, options, chosen) => {
    select.replaceChildren();
    for (const [value, text] of options) made("option", text, select).value = value;
    if (chosen !== null && chosen !== undefined) select.value = chosen;
    select.disabled = !options.length;
  };

  function choose(table) {
    const name = data.tables[table].name, own = shards.map((x, i) => [i, x]).filter(([, x]) => x.table === table);
    byId("what-if-table").textContent = name;
    choices(byId("what-if-shard"), own.map(([i, x]) => [i, label(x)]));
    state.to = state.shard = null;
    if (!own.length) {
      choices(byId("what-if-device"), []);
      showDevices();
      const kinds = [...new Set(data.tables[table].is.map((p) => p.kind))].join(", ");
      return say(`${name} is on several devices (${kinds}), which share its exchanges: this page cannot tell what a move `
        + "would do. Change the plan, and run shardcore price.");
    }
    const last = data.bottleneck, here = own.find(([, x]) => x.device === last) || own[0];
    chooseShard(here[0]);
  }

  function chooseShard(shard) {
    state.shard = shard;
    byId("what-if-shard").value = shard;
    const found = targets(shard).map((d) => [d, whatIf(shard, d)]).sort((a, b) => b[1].fits - a[1].fits || a[1].total_ms - b[1].total_ms);
    choices(byId("what-if-device"), found.map(([d, after]) =>
      [d, `${d}: ${percent(after.total_ms / step_ms - 1)}${after.fits ? "" : ", does not fit"}`]));
    state.to = found.length ? found[0][0] : null;
    showMove();
  }

  function say(text) { byId("what-if-says").textContent = text; byId("what-if-rows").replaceChildren(); }

  function showMove() {
    const x = shards[state.shard], name = data.tables[x.table].name;
    showDevices();
    if (state.to === null) return say(`${name} cannot move: ${x.stays || "no other device may have it"}.`);
    const after = whatIf(state.shard, state.to);
    const over = data.devices.map((device, d) => [d, after.used[d] - device.free]).filter(([, n]) => n > 0);
    const fits = after.fits ? "It fits." : over.length ? `It does not fit: device ${over[0][0]} lacks ${size(Math.ceil(over[0][1]))}.`
      : "It does not fit: an op would have more ids or features than FBGEMM runs.";
    say(`With ${name} (${label(x)}) on device ${state.to}, a step takes ${ms(after.total_ms)} ms instead of ${ms(step_ms)}: `
      + `${percent(after.total_ms / step_ms - 1)}. ${fits}`);
    const slowest = (ready) => ready.indexOf(most(ready));
    const last = slowest(after.compute.map((t, d) => t + after.backward[d]));
    for (const d of [...new Set([x.device, state.to, data.bottleneck, last])]) {
      const row = made("tr", "", byId("what-if-rows")), device = data.devices[d];
      const role = [d === x.device && "from", d === state.to && "to", d === data.bottleneck && "ready last before",
        d === last && "ready last after"].filter(Boolean).join(", ");
      const busy = (compute, forward, backward) => compute[d] + forward[d] + backward[d];
      for (const cell of [`device ${d}: ${role}`, ms(busy(law.compute_ms, law.forward_ms, law.backward_ms)),
        ms(busy(after.compute, after.forward, after.backward)), size(device.used), size(Math.round(after.used[d])), size(device.free)]) {
        made("td", cell, row);
      }
    }
  }

  function putBack() {
    state.shard = state.to = null;
    byId("what-if-table").textContent = "no table yet";
    choices(byId("what-if-shard"), []);
    choices(byId("what-if-device"), []);
    say("");
    showDevices();
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
    const after = state.to === null ? null : whatIf(state.shard, state.to);
    const before = after ? data.devices : data.before ? data.before.devices : [];
    const lines = (value) => data.devices.map((_, d) => (before[d] ? [value(before[d])] : []));
    const times = data.devices.map(({ms: was}, d) => {
      if (!after) return was;
      const share = law.compute_ms[d] > 0 ? was[0] / law.compute_ms[d] : 0;
      return [share * after.compute[d], (1 - share) * after.compute[d], after.waiting[d], after.forward[d], after.backward[d], after.input];
    });
    bars(byId("devices"), times, data.parts.map((_, k) => `part-${k}`), lines((d) => sum(d.ms)));
    bars(byId("memory"), data.devices.map((d, i) => {
      const used = after ? after.used[i] : d.used;
      return [used, Math.max(0, d.free - used)];
    }), ["used", "free"], lines((d) => d.used));
  }

  const kinds = byId("kind");
  for (const kind of ["", ...new Set(data.tables.flatMap((t) => t.is.map((p) => p.kind)))].sort()) {
    made("option", kind || "every kind", kinds).value = kind;
  }
  kinds.onchange = () => { state.kind = kinds.value; showTables(); };
  byId("filter").oninput = (event) => { state.text = event.target.value; showTables(); };
  if (data.before) byId("moved").onchange = (event) => { state.moved = event.target.checked; showTables(); };
  byId("tables-body").onkeydown = (event) => { if (event.target.tagName === "TR") walk(event, "ArrowUp", "ArrowDown"); };
  if (law) {
    byId("tables-body").onclick = (event) => {
      const row = event.target.closest("tr");
      if (row) choose(+row.dataset.table);
    };
    byId("what-if-shard").onchange = (event) => chooseShard(+event.target.value);
    byId("what-if-device").onchange = (event) => { state.to = +event.target.value; showMove(); };
    byId("what-if-back").onclick = putBack;
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") putBack(); });
    putBack();
  }
  byId("theme").onclick = () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  };
  showHead();
  showDevices();
  showTables();
})();
