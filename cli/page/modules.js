// The modules, each with all that is inside of it; a click folds.
const above = (path) => (path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
const rows = new Map();
data.profiles.forEach((p, which) => {
  for (const [path, type, ...own] of p.modules) {
    for (let at = path; ; at = above(at)) {
      if (!rows.has(at)) rows.set(at, { type: "", sums: data.profiles.map(() => null), order: rows.size });
      const row = rows.get(at);
      row.sums[which] = (row.sums[which] || own.map(() => 0)).map((v, i) => v + own[i]);
      if (at === "") break;
    }
    rows.get(path).type = type;
  }
});
make("h2", page, "Modules");
make("p", page, "Each with all that is inside of it: what backward needs of it, what its forward and its backward allocate, and their time. A ratio is the second file's to the first's.".replace(
  data.profiles.length > 1 ? "" : / A ratio.*$/, ""), { class: "quiet" });
const table = make("table", make("div", page, undefined, { class: "scroll" }), undefined, { id: "modules" }), head = make("thead", table), body = make("tbody", table);
const two = data.profiles.length > 1, columns = ["saved", "forward", "backward", "time"];
const names = make("tr", head);
for (const name of ["module", "type"]) make("th", names, name, two ? { rowspan: 2 } : {});
for (const name of columns) make("th", names, name, two ? { colspan: data.profiles.length + 1, class: "group first" } : {});
if (two) {
  const files = make("tr", head);
  for (const _ of columns) {
    file_names(data.profiles.map((p) => p.title)).forEach((name, i) => make("th", files, name, { title: data.profiles[i].title, class: i ? "" : "first" }));
    make("th", files, "ratio");
  }
}
const open = new Set([""]);
const depth = (path) => (path === "" ? 0 : path.split(".").length);
const parents = new Set([...rows.keys()].filter((k) => k).map(above));
// Each module before what is inside of it.
const order = [];
const visit = (path) => {
  order.push(path);
  [...rows.keys()].filter((k) => k && above(k) === path).sort((a, b) => rows.get(a).order - rows.get(b).order).forEach(visit);
};
visit("");
const fill = () => {
  body.replaceChildren();
  for (const path of order) {
    const around = path.split(".").map((_, i, all) => all.slice(0, i).join("."));
    if (path && !around.every((a) => open.has(a))) continue;
    const { type, sums } = rows.get(path), inner = parents.has(path);
    if (path && sums.every((s) => !s || s.every((v) => v === 0))) continue;
    const row = make("tr", body, undefined, inner ? { class: "fold" } : {});
    const mark = inner ? (open.has(path) ? "▾ " : "▸ ") : "  ";
    make("td", row, mark + (path ? path.slice(path.lastIndexOf(".") + 1) : "(model)"), { style: `padding-left:${depth(path)}em` });
    make("td", row, type, { class: "quiet" });
    columns.forEach((_, i) => {
      sums.forEach((s, n) => make("td", row, s ? (i < 3 ? bytes_text(s[i]) : time_text(s[i])) : "–", two && !n ? { class: "first" } : {}));
      if (two) make("td", row, ratio_text(sums[0]?.[i], sums[1]?.[i] ?? null));
    });
    if (inner) row.onclick = () => { open.has(path) ? open.delete(path) : open.add(path); fill(); };
  }
};
fill();
