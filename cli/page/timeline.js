const tip = document.getElementById("tip");
const bytes = (b) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(b) >= 1024 && unit < 4; ++unit) b /= 1024;
  return unit ? b.toFixed(1) + " " + units[unit] : b + " B";
};
const ms = (us) => (us / 1000).toFixed(us < 1e5 ? 2 : 0) + " ms";

// Live bytes of each group after each event, one row an event.
for (const p of data.profiles) {
  const n = p.t.length, g = data.groups.length, live = new Float64Array(g);
  p.stack = new Float64Array(n * g);
  p.total = new Float64Array(n);
  for (let i = 0, sum = 0; i < n; ++i) {
    live[p.group[i]] += p.bytes[i];
    p.total[i] = sum += p.bytes[i];
    p.stack.set(live, i * g);
  }
}
const most = 1.06 * Math.max(1, ...data.profiles.map((p) => p.peak));
const longest = Math.max(1, ...data.profiles.map((p) => p.t[p.t.length - 1] || 1));
const view = { from: 0, to: longest };

make("h1", page, "Live bytes over one training step");
make("p", page, "Wheel: zoom. Drag: move. Double click: all of it. Time is that of the step that was recorded, which recording makes slower.", { class: "quiet" });
const columns = make("div", page, undefined, { class: "columns" });
const charts = make("div", columns), beside = make("div", columns, undefined, { class: "scroll" });
const keys = make("div", charts, undefined, { style: "max-width: 860px" });
data.groups.forEach((name, i) => {
  const key = make("span", keys, undefined, { class: "key" });
  make("span", key, undefined, { class: "swatch", style: "background:" + data.colors[i] });
  key.append(name);
});

const left = 74, width = 860, height = 300, bottom = 24;
const draw = [];
// The last event at or before a time; -1: none.
const event_at = (p, t) => {
  let low = -1, high = p.t.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (p.t[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
};
const tick = (range, count) => {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((m) => rough <= m * power) * power;
};

for (const p of data.profiles) {
  make("h2", charts, p.title);
  make("div", charts, `peak ${bytes(p.peak)} (${p.place}); saved for backward ${bytes(p.saved)}` + (p.step ? `; ${ms(p.step * 1e6)} a step, median` : ""));
  const canvas = make("canvas", charts), ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = (height + bottom) * ratio;
  canvas.style.width = width + "px";
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  const x = (t) => left + ((t - view.from) / (view.to - view.from)) * (width - left - 8);
  const y = (b) => height * (1 - b / most) + 6;
  const time = (px) => view.from + ((px - left) / (width - left - 8)) * (view.to - view.from);
  let cursor = -1;
  const paint = () => {
    c.clearRect(0, 0, width, height + bottom);
    c.font = "11.5px sans-serif";
    c.save();
    c.beginPath();
    c.rect(left, 0, width - left - 8, height + 6);
    c.clip();
    if (p.backward !== null) {
      c.fillStyle = "#f1f1f1";
      c.fillRect(x(p.backward), 6, x(p.t[p.t.length - 1]) - x(p.backward), height);
    }
    // A pixel column shows the moment with the most live bytes in it.
    const first = Math.max(0, event_at(p, view.from)), last = event_at(p, view.to), picks = [];
    for (let i = first, column = -1; i <= last; ++i) {
      const px = Math.round(x(p.t[i]));
      if (px !== column) { picks.push(i); column = px; }
      else if (p.total[i] > p.total[picks[picks.length - 1]]) picks[picks.length - 1] = i;
    }
    const g = data.groups.length;
    for (let k = g - 1; k >= 0; --k) {
      c.beginPath();
      c.moveTo(left, y(0));
      let at = y(0);
      picks.forEach((i, n) => {
        let sum = 0;
        for (let j = 0; j <= k; ++j) sum += Math.max(0, p.stack[i * g + j]);
        const px = n === 0 && p.t[i] <= view.from ? left : x(p.t[i]);
        c.lineTo(px, at);
        c.lineTo(px, at = y(sum));
      });
      c.lineTo(x(last >= 0 && last === p.t.length - 1 ? p.t[last] : view.to), at);
      c.lineTo(x(last >= 0 && last === p.t.length - 1 ? p.t[last] : view.to), y(0));
      c.fillStyle = data.colors[k];
      c.fill();
    }
    const peak = p.total.indexOf(p.peak);
    if (peak >= 0) {
      c.beginPath();
      c.arc(x(p.t[peak]), y(p.peak), 4, 0, 7);
      c.fillStyle = "#fff"; c.fill();
      c.lineWidth = 2; c.strokeStyle = "#000"; c.stroke();
    }
    if (cursor >= 0) { c.lineWidth = 1; c.strokeStyle = "#000"; c.beginPath(); c.moveTo(cursor, 0); c.lineTo(cursor, height + 6); c.stroke(); }
    c.restore();
    c.fillStyle = "#333"; c.strokeStyle = "#0002"; c.lineWidth = 1; c.textAlign = "right";
    for (let v = 0, s = tick(most / 1048576, 5); v * 1048576 <= most; v += s) {
      c.fillText(+v.toPrecision(6) + " MiB", left - 6, y(v * 1048576) + 4);
      c.beginPath(); c.moveTo(left, y(v * 1048576)); c.lineTo(width - 8, y(v * 1048576)); c.stroke();
    }
    c.textAlign = "center";
    const s = tick((view.to - view.from) / 1000, 8);
    for (let v = Math.ceil(view.from / 1000 / s) * s; v * 1000 <= view.to; v += s) c.fillText(+v.toPrecision(6) + " ms", x(v * 1000), height + 20);
  };
  draw.push(paint);
  canvas.addEventListener("mousemove", (e) => {
    const t = time(e.offsetX), i = event_at(p, t), g = data.groups.length;
    cursor = e.offsetX;
    if (e.buttons & 1) {
      const by = Math.min(Math.max(time(0) - time(e.movementX), -view.from), longest - view.to);
      view.from += by; view.to += by;
      draw.forEach((f) => f());
    } else paint();
    if (i < 0) { tip.style.display = "none"; return; }
    tip.replaceChildren();
    make("div", tip, `${ms(p.t[i])}, ${p.backward !== null && p.t[i] >= p.backward ? "backward" : "forward"}: ${bytes(p.total[i])}`, { style: "font-weight:bold" });
    make("div", tip, `${p.bytes[i] >= 0 ? "+" : "−"}${bytes(Math.abs(p.bytes[i]))} ${p.names[p.module[i]]} ${p.names[p.op[i]]}`);
    for (let k = g - 1; k >= 0; --k) {
      if (p.stack[i * g + k] <= 0) continue;
      const row = make("div", tip);
      make("span", row, undefined, { class: "swatch", style: "background:" + data.colors[k] });
      row.append(`${data.groups[k]}: ${bytes(p.stack[i * g + k])}`);
    }
    tip.style.display = "block";
    tip.style.left = Math.min(e.clientX + 16, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(e.clientY + 12, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  canvas.addEventListener("mouseleave", () => { cursor = -1; tip.style.display = "none"; paint(); });
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const t = time(e.offsetX), factor = e.deltaY > 0 ? 1.25 : 0.8;
    const span = Math.min(longest, Math.max(20, (view.to - view.from) * factor));
    view.from = Math.min(Math.max(0, t - ((t - view.from) / (view.to - view.from)) * span), longest - span);
    view.to = view.from + span;
    draw.forEach((f) => f());
  }, { passive: false });
  canvas.addEventListener("dblclick", () => { view.from = 0; view.to = longest; draw.forEach((f) => f()); });
}
draw.forEach((f) => f());

// The modules, each with all that is inside of it; a click folds.
const rows = new Map();
data.profiles.forEach((p, which) => {
  for (const [path, type, ...own] of p.modules) {
    for (let at = path; ; at = at.includes(".") ? at.slice(0, at.lastIndexOf(".")) : "") {
      if (!rows.has(at)) rows.set(at, { type: "", sums: data.profiles.map(() => null), order: rows.size });
      const row = rows.get(at);
      row.sums[which] = (row.sums[which] || own.map(() => 0)).map((v, i) => v + own[i]);
      if (at === "") break;
    }
    rows.get(path).type = type;
  }
});
const table = make("table", beside), head = make("tr", make("thead", table)), body = make("tbody", table);
const two = data.profiles.length > 1;
["module", "type", ...["saved", "forward", "backward", "time"].flatMap((h) => (two ? [h, "other"] : [h]))].forEach((h) => make("th", head, h));
const open = new Set([""]);
const depth = (path) => (path === "" ? 0 : path.split(".").length);
const parents = new Set([...rows.keys()].filter((k) => k).map((k) => (k.includes(".") ? k.slice(0, k.lastIndexOf(".")) : "")));
for (const path of parents) if (depth(path) < 1) open.add(path);
// Each module before what is inside of it.
const order = [];
const visit = (path) => {
  order.push(path);
  [...rows.keys()].filter((k) => k && k !== path && (k.includes(".") ? k.slice(0, k.lastIndexOf(".")) : "") === path)
    .sort((a, b) => rows.get(a).order - rows.get(b).order).forEach(visit);
};
visit("");
const fill = () => {
  body.replaceChildren();
  for (const path of order) {
    const above = path.split(".").map((_, i, all) => all.slice(0, i).join("."));
    if (path && !above.every((a) => open.has(a))) continue;
    const { type, sums } = rows.get(path), inner = parents.has(path);
    if (path && sums.every((s) => !s || s.every((v) => v === 0))) continue;
    const row = make("tr", body, undefined, inner ? { class: "fold" } : {});
    const mark = inner ? (open.has(path) ? "▾ " : "▸ ") : "  ";
    make("td", row, mark + (path ? path.slice(path.lastIndexOf(".") + 1) : "(model)"), { style: `padding-left:${depth(path)}em` });
    make("td", row, type, { class: "quiet" });
    for (let i = 0; i < 4; ++i) for (const s of sums) make("td", row, s ? (i < 3 ? bytes(s[i]) : ms(s[i])) : "–");
    if (inner) row.onclick = () => { open.has(path) ? open.delete(path) : open.add(path); fill(); };
  }
};
fill();
