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
  p.end = n ? p.t[n - 1] : 0;
}
const most = 1.06 * Math.max(1, ...data.profiles.map((p) => p.peak));
const longest = Math.max(1, ...data.profiles.map((p) => p.end));
// What is drawn, in microseconds; where the cursor is, and where a drag began.
const view = { from: 0, to: longest, cursor: null, drag: null };

make("h1", page, "Live bytes over one training step");
make("p", page, "Drag over a part to zoom in, double click for all of it; the wheel zooms with Ctrl; two fingers zoom and move, one reads. Time is that of the step that was recorded, which recording makes slower.", { class: "quiet" });
const buttons = make("div", page, undefined, { class: "bar" }), charts = make("div", page, undefined, { id: "charts" });
const keys = make("div", page, undefined, { class: "bar", id: "keys" });
const key = (color, text) => {
  const entry = make("span", keys, undefined, { title: text });
  make("span", entry, undefined, { class: "swatch", style: "background:" + color });
  entry.append(shorter(text, 40));
};
data.groups.forEach((name, i) => key(data.colors[i], name));
key("var(--shade)", "grey: backward runs");

// Where things are; the same in every chart.
const place = { left: 74, top: 6, below: 40, width: 0, height: 300 };
const x = (t) => place.left + ((t - view.from) / (view.to - view.from)) * (place.width - place.left - 8);
const y = (b) => place.top + place.height * (1 - b / most);
const time = (px) => view.from + ((px - place.left) / (place.width - place.left - 8)) * (view.to - view.from);
const show = (from, to) => {
  const span = Math.min(longest, Math.max(20, to - from));
  view.from = Math.min(Math.max(0, from), longest - span);
  view.to = view.from + span;
  paint_all();
};
const zoom = (t, factor) => show(t - (t - view.from) * factor, t + (view.to - t) * factor);

// The last event at or before a time; -1: none.
const event_at = (p, t) => {
  let low = -1, high = p.t.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (p.t[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
};
const mark_step = (range, count) => {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((m) => rough <= m * power) * power;
};

const areas = (p, c) => {
  // A pixel column shows the moment with the most live bytes in it.
  const first = Math.max(0, event_at(p, view.from)), last = event_at(p, view.to), picks = [];
  for (let i = first, column = -1; i <= last; ++i) {
    const px = Math.round(x(p.t[i]));
    if (px !== column) { picks.push(i); column = px; }
    else if (p.total[i] > p.total[picks[picks.length - 1]]) picks[picks.length - 1] = i;
  }
  const g = data.groups.length, end = x(last >= 0 && last === p.t.length - 1 ? p.end : view.to);
  for (let k = g - 1; k >= 0; --k) {
    c.beginPath();
    c.moveTo(place.left, y(0));
    let at = y(0);
    picks.forEach((i, n) => {
      let sum = 0;
      for (let j = 0; j <= k; ++j) sum += Math.max(0, p.stack[i * g + j]);
      const px = n === 0 && p.t[i] <= view.from ? place.left : x(p.t[i]);
      c.lineTo(px, at);
      c.lineTo(px, at = y(sum));
    });
    c.lineTo(end, at);
    c.lineTo(end, y(0));
    c.fillStyle = data.colors[k];
    c.fill();
  }
};
const axes = (p, c, color) => {
  const { left, width, height, top } = place;
  c.fillStyle = color("--ink");
  c.strokeStyle = color("--grid");
  c.lineWidth = 1;
  c.textAlign = "right";
  for (let v = 0, s = mark_step(most / 1048576, 5); v * 1048576 <= most; v += s) {
    c.fillText(+v.toPrecision(6) + " MiB", left - 6, y(v * 1048576) + 4);
    c.beginPath(); c.moveTo(left, y(v * 1048576)); c.lineTo(width - 8, y(v * 1048576)); c.stroke();
  }
  c.textAlign = "center";
  const s = mark_step((view.to - view.from) / 1000, Math.max(2, (width - left) / 100));
  for (let v = Math.ceil(view.from / 1000 / s) * s; v * 1000 <= view.to; v += s) {
    const text = +v.toPrecision(6) + " ms";
    if (x(v * 1000) + c.measureText(text).width / 2 < width) c.fillText(text, x(v * 1000), top + height + 16);
  }
  if (p.backward === null) return;
  const at = x(p.backward), words = top + height + 34;
  c.textAlign = "right";
  if (at - 5 - c.measureText("forward").width > left && at < width - 8) c.fillText("forward", at - 5, words);
  c.textAlign = "left";
  if (at > left && at + 5 + c.measureText("backward").width < width - 8) c.fillText("backward", at + 5, words);
};
const paint = (p, canvas) => {
  const c = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name);
  const { left, top, width, height } = place;
  c.clearRect(0, 0, width, height + top + place.below);
  c.font = "11.5px sans-serif";
  c.save();
  c.beginPath();
  c.rect(left, 0, width - left - 8, height + top);
  c.clip();
  if (p.backward !== null) {
    c.fillStyle = color("--shade");
    c.fillRect(x(p.backward), top, x(p.end) - x(p.backward), height);
  }
  areas(p, c);
  const line = (at, dashes) => {
    c.setLineDash(dashes); c.lineWidth = 1; c.strokeStyle = color("--ink");
    c.beginPath(); c.moveTo(at, 0); c.lineTo(at, height + top); c.stroke();
    c.setLineDash([]);
  };
  if (p.backward !== null) line(x(p.backward), [4, 3]);
  const peak = p.total.indexOf(p.peak);
  if (peak >= 0) {
    c.beginPath();
    c.arc(x(p.t[peak]), y(p.peak), 4, 0, 7);
    c.fillStyle = color("--paper"); c.fill();
    c.lineWidth = 2; c.strokeStyle = color("--ink"); c.stroke();
  }
  if (view.cursor !== null) line(x(view.cursor), []);
  if (view.cursor !== null && view.drag !== null) {
    c.fillStyle = color("--grid");
    c.fillRect(x(view.drag), 0, x(view.cursor) - x(view.drag), height + top);
  }
  c.restore();
  axes(p, c, color);
};

const canvases = data.profiles.map((p) => {
  const first = data.profiles[0], against = (of) => (p === first ? "" : `, ratio ${ratio_text(of(first), of(p))}`);
  make("h2", charts, p.title);
  make("div", charts, `peak ${bytes_text(p.peak)}${against((q) => q.peak)} (${p.place}); saved for backward ${bytes_text(p.saved)}${against((q) => q.saved)}` +
    (p.step ? `; ${time_text(p.step * 1e6)} a step, median${against((q) => q.step)}` : ""));
  return make("canvas", charts);
});
const paint_all = () => data.profiles.forEach((p, i) => paint(p, canvases[i]));
const fit = () => {
  const ratio = window.devicePixelRatio || 1;
  place.width = charts.clientWidth;
  // All charts in one window, so that the cursor is seen in each.
  place.height = Math.max(160, Math.min(place.width < 600 ? 200 : 320, (window.innerHeight - 150) / canvases.length - 110));
  for (const canvas of canvases) {
    canvas.width = place.width * ratio;
    canvas.height = (place.top + place.height + place.below) * ratio;
    canvas.style.height = place.top + place.height + place.below + "px";
    canvas.getContext("2d").scale(ratio, ratio);
  }
  paint_all();
};
new ResizeObserver(fit).observe(charts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint_all);

const button = (text, title, act) => { make("button", buttons, text, { title, "aria-label": title }).onclick = act; };
const middle = () => view.cursor ?? (view.from + view.to) / 2;
button("+", "zoom in", () => zoom(middle(), 0.5));
button("−", "zoom out", () => zoom(middle(), 2));
button("all", "the whole step", () => show(0, longest));

// What is live at the cursor, in every chart.
const tip = document.getElementById("tip");
const forget = () => { view.cursor = view.drag = null; tip.style.display = "none"; paint_all(); };
const read = (t, clientX, clientY) => {
  view.cursor = Math.min(Math.max(t, view.from), view.to);
  paint_all();
  const g = data.groups.length, at = data.profiles.map((p) => event_at(p, view.cursor));
  tip.replaceChildren();
  const table = make("table", tip), head = make("tr", make("thead", table)), body = make("tbody", table);
  make("th", head, time_text(view.cursor));
  for (const name of file_names(data.profiles.map((p) => p.title))) make("th", head, data.profiles.length > 1 ? name : "");
  const row = (name, color, text) => {
    const r = make("tr", body), cell = make("td", r);
    if (color) make("span", cell, undefined, { class: "swatch", style: "background:" + color });
    cell.append(name);
    data.profiles.forEach((p, n) => make("td", r, at[n] < 0 ? "–" : text(p, at[n])));
  };
  row("", null, (p, i) => (view.cursor > p.end ? "the step is over" : p.backward !== null && p.t[i] >= p.backward ? "backward" : "forward"));
  row("live", null, (p, i) => bytes_text(p.total[i]));
  const narrow = window.innerWidth < 700;
  const most_of = (k) => Math.max(...data.profiles.map((p, n) => (at[n] < 0 ? 0 : p.stack[at[n] * g + k])));
  const groups = data.groups.map((_, k) => k).filter((k) => most_of(k) > 0).reverse();
  const large = new Set([...groups].sort((a, b) => most_of(b) - most_of(a)).slice(0, narrow ? 5 : g));
  for (const k of groups) if (large.has(k)) row(shorter(data.groups[k], narrow ? 16 : 28), data.colors[k], (p, i) => bytes_text(Math.max(0, p.stack[i * g + k])));
  row("last", null, (p, i) => `${p.bytes[i] >= 0 ? "+" : "−"}${bytes_text(Math.abs(p.bytes[i]))} ${shorter(p.names[p.module[i]], narrow ? 20 : 28)} ${p.names[p.op[i]]}`);
  tip.style.display = "block";
  const free = window.innerHeight - tip.offsetHeight - 8;
  tip.style.left = (narrow ? 8 : Math.max(8, clientX + 16 + tip.offsetWidth < window.innerWidth ? clientX + 16 : clientX - 16 - tip.offsetWidth)) + "px";
  tip.style.top = Math.max(8, narrow ? (clientY > window.innerHeight / 2 ? 8 : free) : Math.min(clientY + 12, free)) + "px";
};

// The fingers, or the mouse's button, that are down: where each is.
const down = new Map();
const spread = () => {
  const [a, b] = [...down.values()];
  return { center: (a + b) / 2, width: Math.max(8, Math.abs(a - b)) };
};
for (const canvas of canvases) {
  canvas.addEventListener("pointerdown", (e) => {
    canvas.setPointerCapture(e.pointerId);
    down.set(e.pointerId, e.offsetX);
    if (e.pointerType === "mouse" && e.button === 0) view.drag = time(e.offsetX);
    read(time(e.offsetX), e.clientX, e.clientY);
  });
  canvas.addEventListener("pointermove", (e) => {
    if (down.size < 2 || !down.has(e.pointerId)) {
      if (e.pointerType === "mouse" || down.size === 1) read(time(e.offsetX), e.clientX, e.clientY);
      return;
    }
    // What lay between two fingers stays between them.
    const before = spread(), t = time(before.center);
    down.set(e.pointerId, e.offsetX);
    const after = spread(), scale = (view.to - view.from) * (before.width / after.width);
    const from = t - ((after.center - place.left) / (place.width - place.left - 8)) * scale;
    show(from, from + scale);
  });
  const up = (e) => {
    if (view.drag !== null && e.type === "pointerup" && Math.abs(x(view.drag) - e.offsetX) > 5) {
      const [from, to] = [view.drag, time(e.offsetX)].sort((a, b) => a - b);
      view.drag = null;
      show(Math.max(view.from, from), Math.min(view.to, to));
    }
    view.drag = null;
    down.delete(e.pointerId);
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", (e) => { if (e.pointerType === "mouse" && !down.size) forget(); });
  canvas.addEventListener("wheel", (e) => {
    const across = Math.abs(e.deltaX) > Math.abs(e.deltaY);
    if (!e.ctrlKey && !across) return;  // the page scrolls
    e.preventDefault();
    if (e.ctrlKey) zoom(time(e.offsetX), e.deltaY > 0 ? 1.25 : 0.8);
    else show(view.from + time(e.deltaX) - time(0), view.to + time(e.deltaX) - time(0));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(0, longest));
}
document.addEventListener("pointerdown", (e) => { if (!canvases.includes(e.target)) forget(); });
