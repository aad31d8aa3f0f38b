"""The page's style and scripts. Without scripts the page shows its tables, unsorted, and names the files of its pictures."""

STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fff, #17181a); --desk: light-dark(#f4f4f2, #0e0f10);
  --ink: light-dark(#1b1b1b, #e4e4e4); --soft: light-dark(#444, #b0b0b0); --line: light-dark(#d8d8d8, #3a3c40);
  --link: light-dark(#0059a3, #7cb8ee); --warn: light-dark(#d55e00, #e8701a); --warn-paper: light-dark(#fff5ec, #2a1e14);
  --mark: light-dark(#a84a00, #f09a55); }
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
main .picture { display: block; overflow-x: auto; min-height: var(--h); } .picture .vega-bind { display: block; font-size: .86rem; }
.picture .vega-bind input { width: min(20rem, 60vw); vertical-align: middle; }
.actions { font-size: .85rem; margin: 0; } .actions > * { margin-right: .8rem; }
.actions button, .tools button { font: inherit; color: var(--link); background: none; border: 0; padding: 0; cursor: pointer; }
.tools { position: sticky; top: 0; z-index: 2; background: var(--paper); border-bottom: 1px solid var(--line); font-size: .86rem;
  max-width: 1104px; margin: 0 auto; padding: .3rem 2rem; display: flex; gap: 1.2rem; align-items: center; }
.tools input { font: inherit; width: 11rem; }
html:not(.scripted) .tools { display: none; } #vg-tooltip-element td.value { overflow-wrap: anywhere; }
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
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .4em;
  background: light-dark(var(--light), var(--dark)); }
.mark { color: var(--mark); font-weight: 600; }
@media (max-width: 700px) { main { padding: 1rem .8rem 3rem; } .tools { padding: .3rem .8rem; }
  h1 { font-size: 1.5rem; } nav > details > ul { columns: 1; }
  th.name, td.name { position: sticky; left: 0; background: var(--paper); min-width: 7rem; } }
@media print { body, main { background: #fff; padding: 0; } figure { break-inside: avoid; }
  .actions, .tools, .filter, nav { display: none; } }
"""

SCRIPT = """
document.documentElement.classList.add("scripted");
globalThis.tables = () => {
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
};
tables();
addEventListener("hashchange", () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", ""));
"""

# It needs the function `vegaEmbed`.
PICTURES = """
let {datasets, specs} = JSON.parse(document.getElementById("pictures-data").textContent);
const views = new Map(), all = () => [...document.querySelectorAll("figure")];
const search = document.getElementById("tool-client"), paper = document.getElementById("tool-paper");
const state = {dark: matchMedia("(prefers-color-scheme: dark)").matches, client: ""};

const walk = (node, visit) => {
  if (node === null || typeof node !== "object") return;
  visit(node);
  Object.values(node).forEach(child => walk(child, visit));
};

// one column of narrower charts on a small screen
const fit = spec => {
  const room = document.querySelector("main").clientWidth - 190;
  if (room > 860) return;
  walk(spec, node => {
    if (node.columns && (node.concat || node.facet)) node.columns = 1;
    else if (node.columns) node.columns = Math.max(1, Math.min(node.columns, Math.floor(room / 180)));
    if (typeof node.width === "number" && node.width > room) {
      if (node.width === node.height) node.height = room;
      node.width = room;
    }
  });
};

const save = (name, href) => Object.assign(document.createElement("a"), {href, download: name}).click();
// a spreadsheet takes a text that begins with these letters for a formula
const plain = csv => csv.replace(/(^|[,\\n]"?)(?=[=+@\\t]|-(?![\\d.]))/g, "$1'");
const table = csv => URL.createObjectURL(new Blob([plain(csv)], {type: "text/csv"}));

// what a reader did to a picture
const touched = {signals: name => /^(zoom|pick|shown)/.test(name), data: name => name.endsWith("_store")};

const show = async (figure, choice, kept) => {
  const name = figure.id, spec = structuredClone(specs[name]);
  if (views.has(name) && choice === undefined) return;
  views.get(name)?.finalize();
  views.set(name, null);
  const changes = spec.usermeta?.switch?.[choice] ?? {};
  for (const side of ["x", "y"]) walk(spec, node => Object.assign(node[side] ?? {}, changes[node[side]?.field]));
  fit(spec);
  spec.datasets = Object.fromEntries(spec.datasets.map(key => [key, datasets[key]]));
  for (const param of spec.config.params) param.value = state[param.name] ?? param.value;
  const options = {mode: "vega-lite", actions: false, renderer: "canvas", tooltip: {theme: "custom"}};
  const {view} = await vegaEmbed(figure.querySelector(".picture"), spec, options);
  if (kept) view.setState(kept);
  view.addEventListener("click", (event, item) => {
    const client = item?.datum?.client;
    if (client !== undefined) set("client", String(client) === state.client ? "" : String(client));
  });
  views.set(name, view);
};

const set = (key, value) => {
  state[key] = value;
  if (key === "client") search.value = value;
  else document.documentElement.style.colorScheme = value ? "dark" : "light";
  paper.textContent = state.dark ? "light" : "dark";
  for (const view of views.values()) view?.signal(key, value).runAsync();
};

const button = (text, press) => {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", press);
  return made;
};

const prepare = figure => {
  const line = figure.querySelector(".actions"), name = figure.id, own = specs[name];
  own.datasets.forEach((_, k) => {
    const number = k ? ` ${k + 1}` : "";
    line.append(button(`CSV${number}`, () => save(`${name}${number}.csv`, table(datasets[specs[name].datasets[k]]))));
  });
  for (const kind of ["svg", "png"]) {
    line.append(button(kind.toUpperCase(), async () => save(`${name}.${kind}`, await views.get(name).toImageURL(kind, 2))));
  }
  const choices = Object.keys(own.usermeta?.switch ?? {});
  if (choices.length) {
    const select = document.createElement("select");
    select.append(...choices.map(text => new Option(text)));
    select.setAttribute("aria-label", "choice");
    select.addEventListener("change", () => show(figure, select.value));
    line.append(select);
  }
};
const folded = figure => figure.closest("details:not([open])");
const draw = async list => { for (const figure of list) await show(figure); };
search.addEventListener("input", () => set("client", search.value));
addEventListener("keydown", event => { if (event.key === "Escape") set("client", ""); });
paper.addEventListener("click", () => set("dark", !state.dark));
set("dark", state.dark);
document.addEventListener("toggle", event => {
  if (event.target.open) draw([...event.target.querySelectorAll("figure")].filter(figure => !folded(figure)));
}, true);

// other data: pictures that changed are drawn anew, with the reader's choices
const take = async next => {
  const before = specs;
  ({datasets, specs} = next);
  for (const figure of all()) {
    const name = figure.id, view = views.get(name), last = [];
    if (!before[name]) {
      prepare(figure);
      if (!folded(figure)) await show(figure);
    } else if (view && JSON.stringify(before[name]) !== JSON.stringify(specs[name])) {
      const kept = view.getState(touched);
      walk(before[name], node => { if (node.name === "shown") last.push(node.value); });
      if (last.includes(kept.signals.shown)) delete kept.signals.shown;
      await show(figure, figure.querySelector("select")?.value ?? "", kept);
    }
  }
};

all().forEach(prepare);
globalThis.corolla = {views, state, set, show, take, all: () => draw(all())};
globalThis.corolla.drawn = draw(all().filter(figure => !folded(figure)));
"""

# It needs `seen`, the server's name of what the page has.
LIVE = """
const told = document.getElementById("tool-live");
const grow = async next => {
  const main = document.querySelector("main"), made = document.createElement("main");
  const title = part => part.querySelector("summary").textContent;
  const open = new Set([...main.querySelectorAll("details[open]")].map(title));
  made.innerHTML = next.main;
  made.querySelectorAll("details").forEach(part => { part.open = open.has(title(part)); });
  for (const figure of made.querySelectorAll("figure")) {
    const known = [...main.querySelectorAll("figure")].find(other => other.id === figure.id);
    if (!known) continue;
    known.querySelector("figcaption").replaceWith(figure.querySelector("figcaption"));
    figure.replaceWith(known);
  }
  main.replaceChildren(...made.childNodes);
  document.title = next.title;
  tables();
  await corolla.take(next.pictures);
};
await corolla.drawn;
for (let known = seen; ;) {
  const answer = await fetch(`?after=${known}`).catch(() => null);
  if (!answer?.ok) break;
  if (answer.status === 204) continue;
  const next = await answer.json();
  await grow(next);
  known = next.state;
}
told.textContent = "no longer watched";
"""
