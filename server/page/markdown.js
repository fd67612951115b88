// Render Markdown to DOM nodes. markdown-it escapes HTML, so model output cannot become markup or script.
import markdownit from "./markdown-it.js";

const md = markdownit({ html: false, breaks: true });
md.validateLink = (url) => /^https?:\/\//i.test(url);
md.renderer.rules.image = (tokens, i) => { // fetch nothing from other machines
  const { escapeHtml } = md.utils, { content, attrs } = tokens[i];
  return `<a href="${escapeHtml(new Map(attrs).get("src"))}">${escapeHtml(content)}</a>`;
};

// Wrap marked parts of the rendered text in spans. marks: ranges [start, end, probability] of the source.
// Rendered characters come in the order of the source, which has markup between them.
function color(into, source, marks) {
  const walker = document.createTreeWalker(into, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  let at = 0, next = 0;
  const markAt = (c) => {
    const found = /\s/.test(c) ? (source[at] === c ? at : -1) : source.indexOf(c, at);
    if (found >= 0) at = found + 1;
    while (next < marks.length && marks[next][1] < at) next += 1;
    return next < marks.length && marks[next][0] < at ? next : -1;
  };
  for (const node of texts) {
    const parts = [];
    for (const c of node.data) {
      const mark = markAt(c);
      if (parts.at(-1)?.mark === mark) parts.at(-1).text += c;
      else parts.push({ mark, text: c });
    }
    node.replaceWith(...parts.map(({ mark, text }) => {
      if (mark < 0) return text;
      const span = document.createElement("span"), probability = marks[mark][2];
      span.className = "d";
      span.textContent = text;
      if (probability) span.dataset.tip = `drafted, ${probability} likely`;
      return span;
    }));
  }
}

// Render source into `into`; copier: makes a button that copies a text.
export function render(into, source, marks, copier) {
  into.innerHTML = md.render(source);
  for (const link of into.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const code of into.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "", text = code.textContent;
    if (globalThis.hljs?.getLanguage(language)) code.innerHTML = globalThis.hljs.highlight(text, { language }).value;
    code.parentElement.tabIndex = 0;
  }
  if (marks?.length) color(into, source, marks);
  for (const pre of into.querySelectorAll("pre")) {
    const box = document.createElement("div"), head = document.createElement("div"), label = document.createElement("span");
    box.className = "code";
    head.className = "head";
    label.textContent = /language-(\S+)/.exec(pre.firstElementChild?.className)?.[1] ?? "";
    head.append(label, copier(() => pre.textContent));
    pre.replaceWith(box);
    box.append(head, pre);
  }
}
