"""The page's style and script. Without scripts the page shows everything, unsorted."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --desk: #f4f4f2; --ink: #1b1b1b; --soft: #444; --line: #d8d8d8; --link: #0059a3;
  --warn: #d55e00; --warn-paper: #fff5ec; --mark: #a84a00; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #17181a; --desk: #0e0f10; --ink: #e4e4e4; --soft: #b0b0b0;
  --line: #3a3c40; --link: #7cb8ee; --warn: #e8701a; --warn-paper: #2a1e14; --mark: #f09a55; } }
html { scroll-behavior: smooth; } * { scroll-margin-top: 1rem; }
body { margin: 0; background: var(--desk); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1104px; margin: 0 auto; padding: 1.5rem 2rem 4rem; background: var(--paper); }
a { color: var(--link); }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 .6rem; border-bottom: 2px solid var(--ink); overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
h2 a, h3 a { color: inherit; text-decoration: none; }
:is(h2, h3) a:hover::after { content: " #"; color: var(--soft); }
p { max-width: 52rem; margin: .5rem 0; } figcaption { max-width: 52rem; color: var(--soft); font-size: .93rem; }
nav { margin: 1.2rem 0; } nav summary { font-weight: 600; cursor: pointer; }
nav ul { margin: .3rem 0; padding-left: 1.2rem; } nav > details > ul { columns: 3 16rem; padding-left: 0; list-style: none; }
nav > details > ul > li { margin-bottom: .5rem; } nav li li { break-inside: avoid; } nav li { overflow-wrap: anywhere; }
figure { margin: 1.2rem 0 2rem; }
.picture { overflow-x: auto; } .picture img { display: block; width: var(--w); max-width: 100%; height: auto; margin: .4rem 0; }
.picture:target img { width: calc(1.6 * var(--w)); max-width: none; }
.zoom { font-size: .85rem; margin: 0; } .zoom .fit, .picture:target + .zoom .full { display: none; }
.picture:target + .zoom .fit { display: inline; }
details.folded { margin: 1rem 0; } details.folded > figure > h3 { display: none; }
details.folded > summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; margin: .8rem 0; }
th, td { padding: .3rem .5rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { border-bottom: 2px solid var(--ink); vertical-align: bottom; } th.n { text-align: right; }
th button, td button { all: unset; cursor: pointer; } button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25B2"; } th[aria-sort=descending] button::after { content: " \\25BC"; }
.std { display: block; font-size: .9em; color: var(--soft); }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } td code { white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 9rem; } code { font-size: .92em; overflow-wrap: anywhere; }
td button { color: var(--link); font-size: .92em; } tr.single td { color: var(--soft); border-bottom-style: dotted; }
tr.single td.name { padding-left: 1.9rem; } .scripted tbody:not(.open) tr.single { display: none; }
html:not(.scripted) td button { display: none; }
.filter { margin: .8rem 0 -.3rem; font-size: .86rem; } .filter input { font: inherit; width: 22rem; max-width: 100%; }
.filter span { color: var(--soft); margin-left: .6rem; }
.warn { border: 2px solid var(--warn); border-left-width: 10px; background: var(--warn-paper); padding: .7rem 1rem;
  margin: 1rem 0; }
.warn p { margin: .2rem 0; max-width: none; }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .4em; background: var(--light); }
@media screen and (prefers-color-scheme: dark) { .swatch { background: var(--dark); } }
.mark { color: var(--mark); font-weight: 600; }
@media (max-width: 700px) { main { padding: 1rem .8rem 3rem; } h1 { font-size: 1.5rem; } nav > details > ul { columns: 1; }
  .picture img { width: min(var(--w), 720px); max-width: none; }
  th.name, td.name { position: sticky; left: 0; background: var(--paper); min-width: 7rem; } }
@media print { body, main { background: #fff; padding: 0; } figure { break-inside: avoid; }
  .zoom, .filter, nav { display: none; } }
"""

SCRIPT = """
document.documentElement.classList.add("scripted");
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending" ||
      (!head.hasAttribute("aria-sort") && !head.classList.contains("n"));
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = body => body.rows[0].cells[column].dataset.value ?? "";
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = head.classList.contains("n") ? a - b : a.localeCompare(b, undefined, {numeric: true});
      return up ? order : -order;
    };
    [...table.tBodies].sort((a, b) => compare(value(a), value(b))).forEach(body => table.append(body));
  }));
}
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies];
  if (bodies.length <= 20) continue;
  const heads = [...table.tHead.rows[0].cells].map(cell => cell.textContent.toLowerCase());
  const cellsOf = body => [...body.rows[0].cells];
  const matches = (body, term) => {
    const [, name, sign, wanted] = term.match(/^([^<>=]+)([<>=])(.+)$/) ?? [];
    const column = sign ? heads.findIndex(head => head.startsWith(name)) : -1;
    if (column < 0) return [...body.querySelectorAll("td")].some(cell => cell.textContent.toLowerCase().includes(term));
    const text = cellsOf(body)[column].textContent.trim().toLowerCase();
    if (sign === "=") return text === wanted || (text !== "" && Number(text) === Number(wanted));
    return sign === "<" ? parseFloat(text) < Number(wanted) : parseFloat(text) > Number(wanted);
  };
  const line = document.createElement("p"), input = document.createElement("input"), count = document.createElement("span");
  line.className = "filter";
  input.type = "search";
  input.placeholder = `filter: words, or ${heads[1].split(" ")[0]}<50`;
  input.setAttribute("aria-label", "show only rows with these words");
  count.setAttribute("role", "status");
  input.addEventListener("input", () => {
    const terms = input.value.toLowerCase().split(/ +/).filter(Boolean);
    for (const body of bodies) body.hidden = !terms.every(term => matches(body, term));
    const shown = bodies.filter(body => !body.hidden).length;
    count.textContent = terms.length ? `${shown} of ${bodies.length} rows` : "";
  });
  line.append(input, count);
  table.parentElement.before(line);
}
for (const button of document.querySelectorAll("button.open")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", button.closest("tbody").classList.toggle("open"));
  });
}
addEventListener("hashchange", () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", ""));
"""
