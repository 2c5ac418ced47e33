const operators = (into, ops) => {
  for (const [name, count] of Object.entries(ops.removed)) make("span", into, `− ${name}${count > 1 ? " ×" + count : ""}`, { class: "op minus" });
  for (const [name, count] of Object.entries(ops.added)) make("span", into, `+ ${name}${count > 1 ? " ×" + count : ""}`, { class: "op plus" });
};
make("h1", page, `${data.a} and ${data.b}`);
const changed = data.methods.filter((m) => m.status !== "same");
make("p", page, changed.length ? `${changed.length} of ${data.methods.length} methods differ.` : "No difference.", { class: "quiet" });
for (const t of data.totals) {
  make("h2", page, `${t.method}, with all that it calls`);
  operators(make("div", page), t);
}
// Unchanged lines far from a change are folded into one row.
const near = 3;
for (const m of changed) {
  const part = make("details", page, undefined, changed.indexOf(m) < 5 ? { open: "" } : {});
  const title = make("summary", part);
  make("b", title, `${m.path || "(model)"}: ${m.type}.${m.method} `);
  make("span", title, m.status === "changed" ? "" : m.status + " ", { class: "quiet" });
  operators(title, m);
  if (m.instances.length > 1) make("div", part, "also " + m.instances.slice(1).join(", "), { class: "quiet" });
  const table = make("table", part, undefined, { class: "code" });
  const row = ([na, a, nb, b, equal]) => {
    const r = make("tr", null);
    make("td", r, na ?? ""); make("td", r, a ?? "", equal || a === null ? {} : { class: "went" });
    make("td", r, nb ?? ""); make("td", r, b ?? "", equal || b === null ? {} : { class: "came" });
    return r;
  };
  const keep = m.rows.map(() => false);
  m.rows.forEach((r, i) => { if (!r[4]) for (let k = i - near; k <= i + near; ++k) keep[k] = true; });
  for (let i = 0; i < m.rows.length;) {
    if (keep[i] || m.rows.length < 2 * near) { table.append(row(m.rows[i++])); continue; }
    let end = i;
    while (end < m.rows.length && !keep[end]) ++end;
    const hidden = m.rows.slice(i, end), gap = make("tr", table, undefined, { class: "gap" });
    make("td", gap, `${hidden.length} equal lines`, { colspan: 4 });
    gap.onclick = () => gap.replaceWith(...hidden.map(row));
    i = end;
  }
}
