// Markdown as nodes of the page, never as HTML text: what a model writes cannot become markup or script.
// Every piece of text knows where it stands in the source, so that ranges of it can be marked.

function node(tag, attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

class Writer {
  constructor(source, marks) {
    this.source = source;
    this.marks = marks ?? []; // [start, end) of what is marked, in order, and a probability if there is one
  }

  // The text start..end of the source, what is marked in spans.
  text(into, start, end) {
    let at = start;
    for (const [from, to, probability] of this.marks) {
      if (to <= at) continue;
      if (from >= end) break;
      if (from > at) into.append(this.source.slice(at, from));
      const span = node("span", { class: "d" });
      if (probability) span.dataset.tip = `drafted, ${probability} likely`;
      span.textContent = this.source.slice(Math.max(from, at), Math.min(to, end));
      into.append(span);
      at = Math.min(to, end);
    }
    if (at < end) into.append(this.source.slice(at, end));
  }

  // Code, strong, emphasis, struck text and links within start..end.
  inline(into, start, end) {
    const { source } = this;
    let plain = start;
    let at = start;
    const flush = (to) => { if (to > plain) this.text(into, plain, to); };
    const wrap = (tag, open, close, length) => {
      flush(at);
      const made = node(tag);
      if (tag === "code") this.text(made, open, close);
      else this.inline(made, open, close);
      into.append(made);
      plain = at = close + length;
    };
    while (at < end) {
      const c = source[at];
      if (c === "\\" && at + 1 < end && /[\\`*_~[\]()#|>-]/.test(source[at + 1])) {
        flush(at);
        plain = at + 1;
        at += 2;
        continue;
      }
      if (c === "`") {
        const ticks = /^`+/.exec(source.slice(at, end))[0];
        const close = source.indexOf(ticks, at + ticks.length);
        if (close >= 0 && close + ticks.length <= end) { wrap("code", at + ticks.length, close, ticks.length); continue; }
      }
      const pair = source.slice(at, at + 2);
      if (pair === "**" || pair === "__" || pair === "~~") {
        const close = source.indexOf(pair, at + 2);
        if (close > at + 2 && close + 2 <= end) { wrap(pair === "~~" ? "del" : "strong", at + 2, close, 2); continue; }
        at += 2;
        continue;
      }
      if ((c === "*" || c === "_") && /\S/.test(source[at + 1] ?? "") && !/\w/.test(c === "_" ? source[at - 1] ?? "" : "")) {
        const close = this.closing(c, at + 1, end);
        if (close > at + 1) { wrap("em", at + 1, close, 1); continue; }
      }
      if (c === "[") {
        const found = /^\[([^\]\n]*)\]\(([^()\s]+)\)/.exec(source.slice(at, end));
        if (found && /^https?:\/\//.test(found[2])) {
          flush(at);
          const link = node("a", { href: found[2], target: "_blank", rel: "noopener noreferrer nofollow" });
          this.inline(link, at + 1, at + 1 + found[1].length);
          into.append(link);
          plain = at = at + found[0].length;
          continue;
        }
      }
      at += 1;
    }
    flush(end);
  }

  // Where emphasis that was opened by c before `start` is closed; -1 if nowhere.
  closing(c, start, end) {
    for (let at = start; at < end; at++) {
      if (this.source[at] === c && /\S/.test(this.source[at - 1]) && this.source[at + 1] !== c) return at;
      if (this.source[at] === c && this.source[at + 1] === c) at += 1;
    }
    return -1;
  }
}

// source as blocks in `into`; marks: ranges of it, in order; copier: makes a button for a text.
export function render(into, source, marks, copier) {
  const writer = new Writer(source, marks);
  const made = document.createDocumentFragment();
  const lines = [];
  for (let start = 0; start <= source.length;) {
    const end = source.indexOf("\n", start) < 0 ? source.length : source.indexOf("\n", start);
    lines.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  let i = 0;
  const lists = []; // open ones: {indent, list}
  const block = (found) => { lists.length = 0; made.append(found); return found; };
  while (i < lines.length) {
    const { start, end, text } = lines[i];
    const fence = /^\s*(`{3,}|~{3,})/.exec(text);
    if (fence) {
      let last = i + 1;
      while (last < lines.length && !lines[last].text.trim().startsWith(fence[1])) last += 1;
      const code = node("code");
      if (last > i + 1) writer.text(code, lines[i + 1].start, lines[Math.min(last, lines.length) - 1].end);
      const box = node("div", { class: "code" }), pre = node("pre", { tabindex: "0" });
      pre.append(code);
      box.append(copier(() => code.textContent), pre);
      block(box);
      i = last + 1;
      continue;
    }
    if (!text.trim()) { i += 1; continue; }
    const heading = /^(#{1,6})\s+/.exec(text);
    if (heading) {
      writer.inline(block(node(`h${Math.min(6, heading[1].length + 2)}`)), start + heading[0].length, end);
      i += 1;
      continue;
    }
    if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(text)) { block(node("hr")); i += 1; continue; }
    const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+/.exec(text);
    if (item) {
      const indent = item[1].length;
      while (lists.length && lists.at(-1).indent > indent) lists.pop();
      if (!lists.length || lists.at(-1).indent < indent) {
        const ordered = /\d/.test(item[2]);
        const list = node(ordered ? "ol" : "ul", ordered ? { start: String(parseInt(item[2], 10)) } : {});
        (lists.at(-1)?.list.lastElementChild ?? made).append(list);
        lists.push({ indent, list });
      }
      const entry = node("li");
      writer.inline(entry, start + item[0].length, end);
      lists.at(-1).list.append(entry);
      i += 1;
      continue;
    }
    if (text.includes("|") && /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/.test(lines[i + 1]?.text ?? "")) {
      const table = node("table");
      for (let row = i; row < lines.length && lines[row].text.includes("|"); row++) {
        if (row === i + 1) continue;
        const cells = node("tr");
        for (const cell of lines[row].text.matchAll(/[^|]+/g)) {
          if (!cell[0].trim() && (cell.index === 0 || cell.index + cell[0].length === lines[row].text.length)) continue;
          const one = node(row === i ? "th" : "td");
          const from = lines[row].start + cell.index;
          writer.inline(one, from + cell[0].length - cell[0].trimStart().length, from + cell[0].trimEnd().length);
          cells.append(one);
        }
        table.append(cells);
      }
      block(table);
      while (i < lines.length && lines[i].text.includes("|")) i += 1;
      continue;
    }
    const quote = /^\s*>\s?/.exec(text);
    if (quote) {
      const box = block(node("blockquote"));
      while (i < lines.length && /^\s*>/.test(lines[i].text)) {
        const skip = /^\s*>\s?/.exec(lines[i].text)[0].length;
        const line = node("div");
        writer.inline(line, lines[i].start + skip, lines[i].end);
        box.append(line);
        i += 1;
      }
      continue;
    }
    if (lists.length && /^\s{2,}/.test(text)) { // an item goes on
      const entry = lists.at(-1).list.lastElementChild;
      entry.append(" ");
      writer.inline(entry, end - text.trimStart().length, end);
      i += 1;
      continue;
    }
    const paragraph = block(node("p"));
    let first = true;
    while (i < lines.length && lines[i].text.trim() && (first || !/^(\s*[-*+]\s|\s*\d{1,9}[.)]\s|#{1,6}\s|\s*>|\s*(```|~~~))/.test(lines[i].text))) {
      if (!first) paragraph.append(node("br"));
      writer.inline(paragraph, lines[i].start, lines[i].end);
      first = false;
      i += 1;
    }
  }
  into.replaceChildren(made);
}
