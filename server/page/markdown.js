// Markdown as nodes of the page, never as HTML text: what a model writes cannot become markup or script.
// Code, headings, strong and emphasised text are shown; all else, such as a list, stays as written.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// The text start..end of the source in `into`, marked ranges of it in spans.
function text(into, { source, marks }, start, end) {
  let at = start;
  for (const [from, to, probability] of marks) {
    if (to <= at) continue;
    if (from >= end) break;
    if (from > at) into.append(source.slice(at, from));
    const span = element("span", { class: "d" }, source.slice(Math.max(from, at), Math.min(to, end)));
    if (probability) span.title = `drafted, ${probability} likely`;
    into.append(span);
    at = Math.min(to, end);
  }
  if (at < end) into.append(source.slice(at, end));
}

// The same with code, strong text and emphasis.
function inline(into, written, start, end) {
  const found = /(`+|\*\*|\*)(?=\S)(.+?)\1/.exec(written.source.slice(start, end));
  if (!found) {
    text(into, written, start, end);
    return;
  }
  const [whole, mark, inner] = found, opened = start + found.index, from = opened + mark.length;
  const made = element({ "**": "strong", "*": "em" }[mark] ?? "code");
  (made.tagName === "CODE" ? text : inline)(made, written, from, from + inner.length);
  text(into, written, start, opened);
  into.append(made);
  inline(into, written, opened + whole.length, end);
}

// written: {source, marks}, ranges [start, end, probability] in order. copier: makes a button for a text.
export function render(into, written, copier) {
  const blocks = [];
  let fence = null; // around the code that a line is in
  let start = 0;
  for (const line of written.source.split("\n")) {
    const end = start + line.length;
    const mark = /^\s*(```|~~~)/.exec(line)?.[1];
    const heading = /^#{1,6} /.exec(line)?.[0].length ?? 0;
    if (fence && mark === fence.mark) fence = null;
    else if (fence) text(fence.code, written, start, end + 1);
    else if (mark) {
      const code = element("code");
      const copy = copier(() => code.textContent);
      blocks.push(element("div", { class: "code" }, copy, element("pre", {}, code)));
      fence = { mark, code };
    } else {
      const block = element(heading ? "h3" : "p");
      inline(block, written, start + heading, end);
      blocks.push(block);
    }
    start = end + 1;
  }
  into.replaceChildren(...blocks);
}
