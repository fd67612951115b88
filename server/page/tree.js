// Draw a draft tree as SVG: the root on the left, a column for each level, the accepted path marked.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 92, HEIGHT = 24, BOX = 80, GAP = 4;

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function percent(logarithm) {
  const share = 100 * Math.exp(logarithm);
  return share < 0.1 ? "< 0.1 %" : `${share < 10 ? share.toPrecision(2) : Math.round(share)} %`;
}

// texts: of the nodes, each after its parent, the root first. parent: of each. path: the accepted nodes.
// scores: log-probability of each node's path to the drafter, null if it has none.
export function draw(into, { texts, parent, path, scores }) {
  const children = texts.map(() => []);
  for (let i = 1; i < texts.length; i++) children[parent[i]].push(i);
  const taken = new Set(path.slice(1)); // the root is the model's own token
  const places = [];
  let rows = 0;
  const place = (node, depth) => {
    // Children follow in order; a node is level with its first child.
    const first = rows;
    for (const child of children[node]) place(child, depth + 1);
    if (!children[node].length) rows += 1;
    places[node] = { x: depth * WIDTH + GAP, y: first * HEIGHT + GAP };
  };
  place(0, 0);
  const depth = Math.max(...places.map(({ x }) => x)) + WIDTH;
  const picture = svg("svg", { width: depth, height: rows * HEIGHT + 2 * GAP, role: "img",
    "aria-label": `Accepted: ${path.slice(1).map((i) => texts[i]).join(" ") || "none"}` });
  for (let i = 1; i < texts.length; i++) {
    const from = places[parent[i]], to = places[i];
    picture.append(svg("line", {
      x1: from.x + BOX, y1: from.y + 9, x2: to.x, y2: to.y + 9, class: taken.has(i) ? "taken" : "",
    }));
  }
  texts.forEach((text, i) => {
    const shown = text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
    const words = svg("text", { x: places[i].x + 4, y: places[i].y + 13 }, shown.length > 11 ? `${shown.slice(0, 10)}…` : shown);
    const tip = scores && i
      ? `${shown}  ${percent(scores[i] - scores[parent[i]])} likely, with its path ${percent(scores[i])}` : shown;
    picture.append(svg("g", { class: taken.has(i) ? "taken" : "", "data-tip": tip },
      svg("rect", { ...places[i], width: BOX, height: 18 }), words));
  });
  into.replaceChildren(picture);
}
