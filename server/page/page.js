// The page: conversations kept in the browser, answers streamed from the server that serves this file.
import { element, render } from "./markdown.js";
import { draw, percent } from "./tree.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "seed", "max_tokens", "speculate", "beside", "coloured"];
// Prompts with many accepted drafts: 1.7 to 2.1 tokens per step with smollm2-135m and its EAGLE-3 head, means
// of three seeds at temperature 0.7. The seeds are not those that the prompts were chosen by.
const PROMPTS = [
  "Write a Python function that checks whether a number is prime.", "List the months of the year.",
  "What are the planets of the solar system?", "Write a letter to a friend about the sea.",
];
const ENDINGS = { stop: "", length: "cut at the limit of tokens", stopped: "stopped" };

let current = null; // a conversation: {id, title, messages: [{role, content, marks, figures, finish, plain}]}
let running = null; // the conversation that is answered: {conversation, stop}
let drafts = true; // the server has a drafter

// -- what the browser keeps ------------------------------------------------------------------

function read(key, otherwise) {
  return JSON.parse(localStorage.getItem(`eagle.${key}`)) ?? otherwise;
}

function write(key, value) {
  try { localStorage.setItem(`eagle.${key}`, JSON.stringify(value)); }
  catch { say("This browser keeps no more: delete a conversation."); }
}

const conversations = () => read("conversations", []); // the last one first
const others = ({ id }) => conversations().filter((one) => one.id !== id); // another tab may have kept some

function keep(conversation) {
  write("conversations", [conversation, ...others(conversation)]);
  showList();
}

function remove(conversation) {
  write("conversations", others(conversation));
  if (conversation.id === current.id) begin();
  else showList();
}

// -- what is shown ---------------------------------------------------------------------------

function say(words) {
  $("banner").textContent = words;
}

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function button(name, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, name);
}

function copier(text) {
  return button("Copy", () => navigator.clipboard.writeText(text()));
}

// One answer, as it comes: its text, and a line of figures.
class Panel {
  constructor(name, answer) {
    this.answer = answer;
    this.thoughts = element("div", { class: "thoughts" });
    this.aside = element("details", {}, element("summary", {}, "Thoughts"), this.thoughts);
    this.text = element("div", { class: "text" });
    this.figures = element("div", { class: "figures" });
    this.node = element("section", {}, element("h2", {}, name), this.aside, this.text, this.figures);
    this.show();
  }

  show() {
    const { content, marks, thoughts, figures, finish } = this.answer;
    this.aside.hidden = !thoughts;
    this.thoughts.textContent = thoughts ?? "";
    render(this.text, { source: content, marks }, copier);
    const { tokens = 0, steps = 0, seconds = 0, error } = figures ?? {};
    this.figures.classList.toggle("failed", Boolean(error));
    const parts = [];
    if (speed(this.answer)) parts.push(`${speed(this.answer).toFixed(1)} tokens/s`);
    if (steps) parts.push(`${((tokens - 1) / steps).toFixed(2)} tokens per step (τ)`);
    if (tokens) parts.push(count(tokens, "token"), `${seconds.toFixed(1)} s`);
    const ending = error ?? (finish ? ENDINGS[finish] : running ? "" : "interrupted");
    if (ending) parts.push(ending);
    this.figures.textContent = parts.join(" · ");
  }
}

// Tokens per second, 0 for a few that came at once: their times are those of the network.
function speed({ figures: { tokens = 0, seconds = 0 } = {} }) {
  return seconds > 0.05 ? (tokens - 1) / seconds : 0;
}

// The comparison of two complete answers.
function speedup(message) {
  const done = (answer) => ["stop", "length"].includes(answer.finish) && speed(answer);
  if (!done(message) || !done(message.plain)) return [];
  const ratio = (speed(message) / speed(message.plain)).toFixed(2);
  return [element("div", { class: "speedup" }, element("strong", {}, `${ratio}×`),
    "the speed of plain decoding, in this one run · ",
    message.content === message.plain.content ? "texts equal" : "texts differ")];
}

function messageNode(message) {
  const again = message === current.messages.at(-1) ? [button("Regenerate", regenerate)] : [];
  if (message.role === "user") {
    return element("article", { class: "message user" }, element("h2", {}, "You"),
      element("div", { class: "text" }, message.content), element("div", { class: "tools" }, ...again));
  }
  const { plain } = message;
  const panels = [new Panel(plain ? "Speculative decoding" : "Answer", message)];
  if (plain) panels.push(new Panel("Plain decoding", plain));
  const node = element("article", { class: `message assistant${plain ? " beside" : ""}` },
    element("div", { class: "answers" }, ...panels.map((panel) => panel.node)),
    ...(plain ? speedup(message) : []), element("div", { class: "tools" }, copier(() => message.content), ...again));
  node.panels = panels;
  return node;
}

function welcome() {
  const explained = drafts
    ? [element("span", { class: "d" }, "Coloured words"), " were drafted and accepted."]
    : ["This server decodes without drafts; --speculate adds them."];
  return element("section", { class: "welcome" }, element("p", { class: "legend" }, ...explained),
    element("div", { class: "prompts" }, ...PROMPTS.map((words) => button(words, () => send(words)))));
}

function showConversation() {
  const { messages } = current;
  $("messages").replaceChildren(...(messages.length ? messages.map(messageNode) : [welcome()]));
  toEnd();
  showList();
}

function atEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function showList() {
  $("conversations").replaceChildren(...conversations().map((one) => element("li", {},
    button(one.title, () => open(one), { class: "pick", "aria-current": one.id === current.id }),
    button("×", () => remove(one), { "aria-label": `Delete ${one.title}` }))));
}

function open(conversation) {
  running?.stop();
  current = conversation;
  $("tree").hidden = true;
  showConversation();
  $("input").focus();
}

function begin() {
  open({ id: `${Date.now()}-${Math.random()}`, title: "", messages: [] });
}

function showTree(tree) {
  if (tree.texts.length < 2) return; // a step without a draft
  $("tree").hidden = false;
  const nodes = count(tree.texts.length, "node"), accepted = count(tree.path.length - 1, "drafted token");
  $("tree").firstElementChild.textContent = `Last draft: ${nodes}, ${accepted} accepted`;
  draw($("drawing"), tree);
}

// -- asking the server -----------------------------------------------------------------------

// The answer of the server. Asks for a key while the server does.
async function request(path, options = {}) {
  const key = sessionStorage.getItem("eagle.key");
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const given = response.status === 401 && prompt("This server asks for an API key:");
  if (!given) throw new Error((await response.json()).error.message);
  sessionStorage.setItem("eagle.key", given.trim());
  return request(path, options);
}

// Events of a stream, one JSON object each.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
  }
}

// Mark the drafted start of a step's text, token by token where the texts of tokens add up to it.
function mark(answer, { text, tree }) {
  let at = answer.content.length;
  const path = tree?.path.slice(1) ?? [];
  if (path.map((i) => tree.texts[i]).join("") !== text) {
    answer.marks.push([at, at + text.length]);
    return;
  }
  for (const i of path) {
    const end = at + tree.texts[i].length;
    answer.marks.push([at, end, tree.scores && percent(tree.scores[i] - tree.scores[tree.parent[i]])]);
    at = end;
  }
}

// One answer from the server into `answer`; `seen` is called as it grows.
async function ask(body, answer, signal, seen) {
  const figures = answer.figures = { tokens: 0, steps: 0, seconds: 0 };
  let first = 0;
  try {
    const options = { method: "POST", body: JSON.stringify(body), signal };
    for await (const chunk of events(await request("v1/chat/completions", options))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const { delta, speculation: step, finish_reason: finish } = chunk.choices[0];
      const { content, reasoning_content: thoughts } = delta;
      if (thoughts) answer.thoughts = (answer.thoughts ?? "") + thoughts;
      if (step) {
        figures.tokens += step.tokens;
        if (first) figures.steps += 1;
        first ||= performance.now();
        figures.seconds = (performance.now() - first) / 1000;
        if (content && step.drafted && content.startsWith(step.text)) mark(answer, step);
        answer.content += content ?? "";
        seen(step.tree);
      }
      answer.finish = finish ?? answer.finish;
    }
    if (!answer.finish) throw new Error("the connection broke");
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else figures.error = error.message;
  }
}

async function about() {
  try {
    const model = (await (await request("v1/models")).json()).data[0];
    $("model").textContent = model.id;
    drafts = model.speculation;
    $("drafting").hidden = !drafts;
    if (!current.messages.length) showConversation();
  } catch (error) { say(error.message); }
}

function settings() {
  const number = (id) => Number($(id).value);
  const seed = $("seed").value ? number("seed") : Math.floor(Math.random() * 2 ** 31);
  return { temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed };
}

// Ask for an answer to the conversation.
async function reply() {
  const conversation = current, speculate = drafts && $("speculate").checked;
  const history = conversation.messages.filter(({ content }) => content)
    .filter(({ role }, i, all) => role !== all[i + 1]?.role) // a question that was never answered
    .map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (system) history.unshift({ role: "system", content: system });
  const body = { messages: history, stream: true, return_speculation: true, ...settings() };
  const message = { role: "assistant", content: "", marks: [] };
  if (speculate && $("beside").checked) message.plain = { content: "", marks: [] };
  conversation.messages.push(message);
  const control = new AbortController();
  running = { conversation, stop: () => control.abort() };
  document.body.classList.add("running");
  keep(conversation);
  showConversation();
  const { panels } = $("messages").lastElementChild;
  let due = false;
  const seen = (tree) => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (conversation !== current) return;
      const follows = atEnd();
      for (const panel of panels) panel.show();
      if (tree) showTree(tree);
      if (follows) toEnd();
    });
  };
  await ask({ ...body, speculate }, message, control.signal, seen);
  // One after the other: together, each would slow the other down.
  if (message.plain && !message.figures.error && !control.signal.aborted) {
    await ask({ ...body, speculate: false }, message.plain, control.signal, () => seen());
  } else delete message.plain;
  running = null;
  document.body.classList.remove("running");
  if (conversations().some(({ id }) => id === conversation.id)) keep(conversation); // it was not deleted
  if (conversation === current) showConversation();
}

function send(words) {
  if (!words || running) return;
  if (!current.messages.length) current.title = words.slice(0, 60);
  current.messages.push({ role: "user", content: words });
  reply();
}

function sendInput() {
  if (running) return;
  const words = $("input").value.trim();
  $("input").value = "";
  $("input").focus();
  send(words);
}

function regenerate() {
  if (current.messages.at(-1).role === "assistant") current.messages.pop();
  reply();
}

// -- everything at its place -----------------------------------------------------------------

const field = (id) => ($(id).type === "checkbox" ? "checked" : "value");
for (const [id, value] of Object.entries(read("settings", {}))) $(id)[field(id)] = value;
const colour = () => document.body.classList.toggle("coloured", $("coloured").checked);
$("settings").addEventListener("change", () => {
  write("settings", Object.fromEntries(SETTINGS.map((id) => [id, $(id)[field(id)]])));
  colour();
});
colour();

$("form").addEventListener("submit", (event) => { event.preventDefault(); sendInput(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendInput();
});
$("stop").addEventListener("click", () => running?.stop());
$("new").addEventListener("click", begin);
addEventListener("keydown", (event) => { if (event.key === "Escape") running?.stop(); });
addEventListener("pagehide", () => running && keep(running.conversation)); // the last words of a half answer

begin();
if (conversations().length) open(conversations()[0]);
about();
