const operators = (into, ops) => {
  for (const [name, count] of Object.entries(ops.removed)) make("span", into, `− ${name}${count > 1 ? " ×" + count : ""}`, { class: "op minus" });
  for (const [name, count] of Object.entries(ops.added)) make("span", into, `+ ${name}${count > 1 ? " ×" + count : ""}`, { class: "op plus" });
};
const near = 3;  // lines around a change that are shown; others are folded into one row

const line = ([na, a, nb, b, equal]) => {
  const r = make("tr", null, undefined, equal ? { class: "equal" } : {});
  const side = (number, text, mark) => {
    make("td", r, number ?? "", text === null ? { class: "none" } : {});
    make("td", r, text ?? "", { class: text === null ? "none" : equal ? "" : mark });
  };
  side(na, a, "went");
  side(nb, b, "came");
  return r;
};
const both_sides = (into, rows) => {
  const table = make("table", into, undefined, { class: "code" });
  // A first row that spans all columns must not decide how wide they are.
  const columns = make("colgroup", table);
  for (const kind of ["number", "", "number", ""]) make("col", columns, undefined, { class: kind });
  const body = make("tbody", table), keep = rows.map(() => false);
  rows.forEach((r, i) => { if (!r[4]) for (let k = i - near; k <= i + near; ++k) keep[k] = true; });
  for (let i = 0; i < rows.length;) {
    if (keep[i] || rows.length < 2 * near) { body.append(line(rows[i++])); continue; }
    let end = i;
    while (end < rows.length && !keep[end]) ++end;
    const hidden = rows.slice(i, end), gap = make("tr", body, undefined, { class: "gap" });
    make("td", gap, `${hidden.length} equal lines`, { colspan: 4 });
    gap.onclick = () => gap.replaceWith(...hidden.map(line));
    i = end;
  }
};
const show_method = (into, m, open) => {
  const part = make("details", into, undefined, open ? { open: "" } : {}), title = make("summary", part);
  make("b", title, `${m.path || "(model)"}: ${m.type}.${m.method} `);
  make("span", title, m.status === "changed" ? "" : m.status + " ", { class: "quiet" });
  operators(title, m);
  if (m.instances.length > 1) make("div", part, "also " + m.instances.slice(1).join(", "), { class: "quiet" });
  both_sides(part, m.rows);
};

make("h1", page, `${data.a} and ${data.b}`);
const changed = data.methods.filter((m) => m.status !== "same");
make("p", page, changed.length ? `${changed.length} of ${data.methods.length} methods differ.` : "No difference.", { class: "quiet" });
for (const t of data.totals) {
  make("h2", page, `${t.method}, with all that it calls`);
  operators(make("div", page), t);
}
// The model's own methods first; what torch.nn brings differs alike in every model.
const own = changed.filter((m) => !m.of_torch), of_pytorch = changed.filter((m) => m.of_torch);
own.forEach((m, i) => show_method(page, m, i < 5));
if (of_pytorch.length) {
  const part = make("details", page, undefined, { id: "of_pytorch", ...(own.length ? {} : { open: "" }) });
  make("summary", part, `${of_pytorch.length} ${of_pytorch.length === 1 ? "method" : "methods"} of PyTorch's own modules`);
  for (const m of of_pytorch) show_method(part, m, false);
}
