// The chat page: conversations are stored in the browser, answers are streamed from the server of this file.
import { render } from "./markdown.js";
import { draw, percent, svg } from "./tree.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens"];
const SETTINGS = ["system", ...NUMBERS, "seed", "speculate", "compare", "colored"];
const STORED_TREES = 32; // draft trees stored with the open conversation
const MIN_COMPARED_TOKENS = 40; // speeds of shorter answers are not compared
const PROMPTS = [ // with high acceptance
  "Write a Python function that checks whether a string is a palindrome.", "List the months of the year.",
  "What are the planets of the solar system?", "Write a letter to a friend about the sea.",
];
const ICONS = {
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3", done: "M3 8.5l3.5 3.5L13 4.5", again: "M13 8a5 5 0 1 1-1.5-3.6L13 6V2.5M13 6H9.5",
  edit: "M3 13l1-3.5 7-7 2.5 2.5-7 7z", delete: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.5 9h6l.5-9",
};
const ENDINGS = { stop: "", length: "stopped at the token limit", stopped: "stopped" };
const store = {
  read(key, otherwise) {
    try { return JSON.parse(localStorage.getItem(`eagle.${key}`)) ?? otherwise; } catch { return otherwise; }
  },
  write(key, value) {
    try { localStorage.setItem(`eagle.${key}`, JSON.stringify(value)); }
    catch { notify("Browser storage is full: delete a chat."); }
  },
};

// Return the valid conversations of a stored list, which another page or an older version may have written. Empty
// answers, interrupted before their first token, are dropped.
function validConversations(list) {
  const isMessage = (one) => one && ["user", "assistant"].includes(one.role) && typeof one.content === "string";
  const found = (Array.isArray(list) ? list : []).filter((one) => one && typeof one.title === "string"
    && Array.isArray(one.messages) && one.messages.every(isMessage));
  for (const one of found) one.messages = one.messages.filter(({ role, content }) => role === "user" || content);
  return found;
}

let conversations = validConversations(store.read("conversations", []));
let current = null; // a conversation: {id, title, messages: [{role, content, marks, trees, figures, finish, plain}]}
let running = null; // the answer in progress: {stop, message}
let edited = null; // the message being edited: {index, unsent}; unsent: the draft that it replaced in the input
let trees = [], shown = 0, pinned = false; // trees of the last answer, index of the one shown, not the latest
let method = "none"; // the server's drafter, see --speculate
let drafts = true; // the server has a drafter

// -- rendering --------------------------------------------------------------------------------

// Show a notice with at most one action; null hides it.
function notify(words, action, act) {
  const button = element("button", { type: "button", onclick: () => { notify(null); act?.(); } }, action ?? "Close");
  $("banner").replaceChildren(...(words ? [words, button] : []));
  const follows = atEnd();
  $("banner").classList.toggle("note", Boolean(action));
  $("banner").hidden = !words;
  if (follows) toEnd();
}

// Set the input, which survives a reload.
function fill(words) {
  $("input").value = words;
  keepInput();
}

function keepInput() {
  sessionStorage.setItem("eagle.input", edited?.unsent ?? $("input").value);
}

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A button with an icon; the name is its tooltip and label.
function icon(sign, name, onclick) {
  return element("button", { type: "button", class: "icon", "aria-label": name, title: name, onclick }, picture(sign));
}

// Icons are SVG: some fonts lack the characters.
function picture(sign) {
  return svg("svg", { viewBox: "0 0 16 16", "aria-hidden": true }, svg("path", { d: ICONS[sign] }));
}

function copier(text) {
  return icon("copy", "Copy", ({ currentTarget: button }) => {
    const done = () => {
      button.replaceChildren(picture("done"));
      setTimeout(() => button.replaceChildren(picture("copy")), 1500);
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text()).then(done, () => notify("The browser denied access to the clipboard."));
    else notify("Copying needs https or localhost.");
  });
}

// An answer while it streams: its text and a line of statistics.
class Panel {
  constructor(name, answer) {
    this.answer = answer;
    this.reasoning = element("div", { class: "reasoning" });
    this.aside = element("details", {}, element("summary", {}, "Reasoning"), this.reasoning);
    this.text = element("div", { class: "text", dir: "auto" });
    this.figures = element("div", { class: "figures" });
    this.node = element("section", { "aria-label": name }, element("h2", {}, name), this.aside, this.text, this.figures);
    this.show();
  }

  show() {
    const { answer } = this;
    this.aside.hidden = !answer.reasoning;
    this.reasoning.textContent = answer.reasoning ?? "";
    render(this.text, answer.content, answer.marks, copier);
    const { tokens = 0, steps = 0, seconds = 0, error, waiting } = answer.figures ?? {};
    const grows = running && [running.message, running.message.plain].includes(answer);
    const ending = error ?? (grows ? "" : ENDINGS[answer.finish] ?? "interrupted");
    this.figures.classList.toggle("failed", Boolean(error));
    const parts = [];
    if (waiting && grows) parts.push("waiting for a slot ...");
    if (speed(answer)) parts.push(`${speed(answer).toFixed(1)} tokens/s`);
    if (steps) parts.push(`${((tokens - 1) / steps).toFixed(2)} tokens per step (τ)`);
    if (tokens) parts.push(count(tokens, "token"), `${seconds.toFixed(1)} s`);
    if (ending) parts.push(ending);
    this.figures.textContent = parts.join(" · ");
  }
}

// Tokens per second; 0 if the tokens arrived at once, so that there is nothing to time.
function speed({ figures: { tokens = 0, seconds = 0 } = {} }) {
  return seconds > 0.05 ? (tokens - 1) / seconds : 0;
}

// Compare two complete answers.
function speedup(message) {
  const done = (answer) => ["stop", "length"].includes(answer.finish);
  if (!message.plain || !done(message) || !done(message.plain)) return [];
  const fewest = Math.min(message.figures.tokens, message.plain.figures.tokens);
  if (fewest < MIN_COMPARED_TOKENS || !speed(message) || !speed(message.plain)) {
    return [element("div", { class: "speedup" }, `${count(fewest, "token")}: too few to compare speeds`)];
  }
  const ratio = (speed(message) / speed(message.plain)).toFixed(2);
  return [element("div", { class: "speedup" }, element("strong", {}, `${ratio}×`),
    "the speed of plain decoding (one run) · ",
    message.content === message.plain.content ? "identical output" : "output differs")];
}

function messageNode(message, index) {
  const again = index === current.messages.length - 1 ? [icon("again", "Regenerate", regenerate)] : [];
  if (message.role === "user") {
    return element("article", { class: "message user" }, element("h2", {}, "You"),
      element("div", { class: "text", dir: "auto" }, message.content), element("div", { class: "tools" },
        copier(() => message.content), icon("edit", "Edit", () => edit(index)), icon("delete", "Delete", () => removeTurn(index)), ...again));
  }
  const { plain } = message;
  const panels = [new Panel(plain ? `Speculative decoding${message.method ? ` (${message.method})` : ""}` : message.model || $("model").textContent || "Assistant", message)];
  if (plain) panels.push(new Panel("Plain decoding", plain));
  const node = element("article", { class: `message assistant${plain ? " compared" : ""}` },
    element("div", { class: "answers" }, ...panels.map((panel) => panel.node)), ...(plain ? speedup(message) : []),
    element("div", { class: "tools" }, copier(() => message.content), ...again));
  node.panels = panels;
  return node;
}

function welcome() {
  const ask = (words) => () => {
    const unsent = $("input").value;
    fill(words);
    send();
    fill(unsent);
  };
  const explained = drafts
    ? "Draft tokens are verified in one forward pass: same output, fewer steps."
    : "Plain decoding; start the server with --speculate to draft.";
  const legend = element("p", { class: "legend" }, element("span", { class: "d" }, "Highlighted text"), ": accepted draft tokens");
  return element("section", { class: "welcome" },
    element("p", {}, `Chat with ${$("model").textContent || "a model"} on this server. ${explained}`), ...(drafts ? [legend] : []),
    element("div", { class: "prompts" },
      ...PROMPTS.map((words) => element("button", { type: "button", onclick: ask(words) }, words))));
}

function showConversation() {
  $("title").textContent = $("title").title = current.title;
  $("messages").replaceChildren(...(current.messages.length ? current.messages.map(messageNode) : [welcome()]));
  $("export").hidden = !current.messages.length;
  trees = current.messages.at(-1)?.trees ?? [];
  if (trees.length) showTree();
  else $("tree").hidden ||= running?.conversation !== current;
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
  const sought = $("search").value.trim().toLowerCase();
  const has = (one) => [one.title, ...one.messages.map(({ content }) => content)].join("\n").toLowerCase().includes(sought);
  const found = conversations.filter(has);
  const none = sought && !found.length ? [element("li", { class: "none" }, "No results.")] : [];
  $("conversations").replaceChildren(...none, ...found.map((one) => element("li", {},
    element("button", { class: "pick", type: "button", "aria-current": String(one === current), title: one.title, onclick: () => open(one) }, element("span", {}, one.title)),
    icon("edit", `Rename ${one.title}`, () => rename(one)), icon("delete", `Delete ${one.title}`, () => remove(one)))));
}

// Store all conversations, with the trees of the open one's last answer. A regenerated answer replaces the old one
// when it is complete.
function keep() {
  const messages = (one) => ((one === running?.conversation && running.old) || one.messages).map((message, i, all) => ({
    ...message, trees: one === current && i === all.length - 1 ? message.trees?.slice(-STORED_TREES) : undefined }));
  store.write("conversations", conversations.map((one) => ({ ...one, messages: messages(one) })));
}

function put(conversation, messages) {
  conversation.messages = messages;
  keep();
  open(conversation);
}

// Load the changes of another tab, except to a conversation that is being answered here.
addEventListener("storage", (event) => {
  if (event.key !== "eagle.conversations") return;
  conversations = validConversations(store.read("conversations", [])).map((one) => (running && one.id === current.id ? current : one));
  const mine = conversations.find((one) => one.id === current.id);
  if (mine && mine !== current) {
    if (edited !== null) endEdit();
    current = mine;
    showConversation();
  } else showList();
});
addEventListener("pagehide", () => running && keep()); // store a partial answer

function open(conversation) {
  if (running) running.left = true;
  running?.stop();
  if (edited !== null) endEdit();
  current = conversation;
  pinned = false;
  store.write("open", current.id);
  toggleSide(false);
  showConversation();
  $("input").focus();
}

function begin() {
  open({ id: `${Date.now()}-${Math.random()}`, title: "New chat", messages: [] });
}

function rename(conversation) {
  conversation.title = prompt("Rename chat:", conversation.title)?.trim() || conversation.title;
  keep();
  if (conversation === current) $("title").textContent = $("title").title = current.title;
  showList();
}

function remove(conversation) {
  const index = conversations.indexOf(conversation);
  conversations = conversations.filter((one) => one !== conversation);
  conversation.deleted = true;
  keep();
  if (conversation === current) begin();
  else showList();
  notify(`Deleted "${conversation.title}".`, "Undo", () => {
    conversation.deleted = false;
    conversations.splice(index, 0, conversation);
    keep();
    open(conversation);
  });
}

// Delete a user message and its answer.
function removeTurn(index) {
  const conversation = current, before = current.messages;
  let next = index + 1;
  while (before[next]?.role === "assistant") next += 1;
  put(conversation, before.filter((_, i) => i < index || i >= next));
  notify("Message deleted.", "Undo", () => put(conversation, before));
}

// Edit a message in the input. Sending replaces it and all later ones; Escape cancels.
function edit(index) {
  edited = { index, unsent: edited?.unsent ?? $("input").value };
  fill(current.messages[index].content);
  $("input").focus();
  notify("Sending replaces this message and all later ones.", "Cancel", endEdit);
}

function endEdit() {
  fill(edited?.unsent ?? "");
  edited = null;
  notify(null);
}

function save() {
  const text = current.messages.map(({ role, content }) => `**${role}**\n\n${content}\n`).join("\n");
  const url = URL.createObjectURL(new Blob([`# ${current.title}\n\n${text}`], { type: "text/markdown" }));
  element("a", { href: url, download: "chat.md" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function toggleSide(shown) {
  $("side").classList.toggle("shown", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
}

// -- requests -------------------------------------------------------------------------------

function headers() {
  const key = sessionStorage.getItem("eagle.key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
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
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function post(body, signal) {
  for (let tries = 0; ; tries++) {
    const response = await fetch("v1/chat/completions",
      { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
    if (response.ok) return response;
    const told = (await response.json().catch(() => null))?.error?.message ?? `status ${response.status}`;
    if (response.status === 401 && askForKey()) continue;
    if ((response.status === 429 || response.status === 503) && tries < 30) {
      await new Promise((resolve) => setTimeout(resolve, 1000 * (response.headers.get("Retry-After") ?? 2)));
      continue;
    }
    throw new Error(told);
  }
}

function askForKey() {
  let words = "This server asks for an API key:";
  for (;;) {
    const key = prompt(words)?.trim();
    if (!key) return false;
    if (/^[\x21-\x7e]+$/.test(key)) {
      sessionStorage.setItem("eagle.key", key);
      return true;
    }
    words = "API keys are printable ASCII characters without spaces. API key:";
  }
}

// Mark the drafted prefix of a step's text, token by token if the token texts add up to it.
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

// Stream an answer from the server into `answer`. seen: called on every chunk.
async function ask(body, answer, signal, seen) {
  answer.figures = { tokens: 0, steps: 0, seconds: 0, waiting: true };
  let first = 0;
  seen();
  try {
    for await (const chunk of events(await post(body, signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
      const step = choice.speculation;
      if (step) {
        const figures = answer.figures;
        figures.waiting = false;
        figures.tokens += step.tokens;
        if (first) figures.steps += 1;
        first ||= performance.now();
        figures.seconds = (performance.now() - first) / 1000;
        if (content) {
          if (step.drafted && content.startsWith(step.text)) mark(answer, step);
          answer.content += content;
        }
        seen(step.tree);
      }
      if (choice.finish_reason) answer.finish = choice.finish_reason;
    }
  } catch (error) {
    const cause = signal.reason ?? error;
    if (cause.name === "AbortError") answer.finish = "stopped";
    else if (cause instanceof TypeError) {
      // Leaving the page also closes its connections: then nothing runs after this line.
      await new Promise((resolve) => setTimeout(resolve, 700));
      const gone = !(await health())?.ok;
      answer.figures.error = gone ? "server unreachable" : "connection lost";
      if (gone) watch();
    } else answer.figures.error = cause.message;
  }
  answer.figures.waiting = false;
  seen();
}

// The response of GET /health; null without one.
function health() {
  return fetch("health", { cache: "no-store", signal: AbortSignal.timeout(10_000) }).catch(() => null);
}

// The server is unreachable: show a notice until it responds.
let watching = false;
async function watch() {
  notify("Server unreachable. Retrying ...");
  if (watching) return;
  watching = true;
  while (!(await health())?.ok) await new Promise((resolve) => setTimeout(resolve, 1000));
  watching = false;
  notify(null);
  about();
}

async function about() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) { if (askForKey()) await about(); return; }
    const model = (await response.json()).data[0];
    $("model").textContent = model.id;
    drafts = model.speculation;
    method = model.method;
    $("drafting").hidden = !drafts;
    if (!running) showConversation(); // show the model's name
  } catch { watch(); }
}

function settings() {
  const numbers = Object.fromEntries(NUMBERS.map((id) => [id, Number($(id).value)]));
  return { ...numbers, seed: Number($("seed").value || Math.floor(Math.random() * 2 ** 31)) };
}

// Request an answer to the conversation. before, title, edit: the previous state, restored on an error. words: the
// message just sent; undefined when regenerating.
async function reply({ before, words, title, edit }) {
  const conversation = current;
  const written = conversation.messages.filter(({ content }) => content)
    .filter(({ role }, i, all) => role !== "user" || all[i + 1]?.role !== "user"); // never answered
  const history = written.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (system) history.unshift({ role: "system", content: system });
  const body = { messages: history, stream: true, return_speculation: true, ...settings() };
  const message = { role: "assistant", content: "", marks: [], trees: [], method, model: $("model").textContent };
  if (drafts && $("compare").checked && $("speculate").checked) message.plain = { content: "", marks: [] };
  conversation.messages = [...conversation.messages, message];
  const control = new AbortController();
  // A suspended machine or a lost network does not end the stream.
  const guard = setInterval(async () => { if (!(await health())) control.abort(new TypeError()); }, 5000);
  const old = before.at(-1)?.role === "assistant" && !words ? before : null; // with the answer to be replaced
  const mine = { stop: () => control.abort(), message, conversation, old };
  running = mine;
  $("messages").ariaBusy = "true"; // read aloud when it is complete
  notify(null);
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  if (words) keep(); // so that a reload has the message
  let kept = performance.now();
  pinned = false;
  showConversation();
  const node = $("messages").lastElementChild;
  let due = false;
  const seen = (newest) => {
    if (newest?.texts.length > 1) message.trees.push(newest); // otherwise the step had no draft
    if (performance.now() - kept > 2000 && message.content && !conversation.deleted) {
      kept = performance.now();
      keep();
    }
    if (due) return;
    due = true;
    setTimeout(() => { // not every frame: rendering slows down a server on this machine
      due = false;
      if (conversation !== current) return;
      const follows = atEnd();
      for (const panel of node.panels) panel.show();
      if (trees.length) showTree();
      if (follows) toEnd();
    }, 100);
  };
  await ask({ ...body, speculate: drafts && $("speculate").checked }, message, control.signal, seen);
  // Sequentially: in parallel they would slow each other down.
  if (message.plain && message.content && !message.figures.error && !control.signal.aborted) {
    await ask({ ...body, speculate: false }, message.plain, control.signal, () => seen());
  } else if (message.plain) delete message.plain;
  clearInterval(guard);
  if (running === mine) {
    running = null;
    $("messages").ariaBusy = "false";
  }
  const { error } = message.figures, unfinished = !["stop", "length"].includes(message.finish);
  if (old && unfinished && (error || mine.left)) conversation.messages = old;
  else if (!message.content && unfinished) { // rejected, or stopped before the first token
    conversation.messages = error || !words ? before : conversation.messages.slice(0, -1);
    if (error && words) {
      conversation.title = title;
      if (edit && conversation === current) edited = { index: edit.index, unsent: $("input").value || edit.unsent };
      fill(edit ? words : [words, $("input").value].filter(Boolean).join("\n\n"));
    }
    if (!conversation.messages.length) conversations = conversations.filter((one) => one !== conversation);
  }
  if (!conversation.deleted) keep();
  if (conversation === current) {
    const follows = atEnd(), at = $("messages").scrollTop;
    showConversation();
    if (!follows) $("messages").scrollTop = at;
  }
  if (error && !watching) notify(error);
  else if (!error && old && unfinished && message.content && !mine.left) {
    notify("Stopped.", "Restore previous answer", () => put(conversation, old));
  }
}

// Show the tree of a step; default: the latest, or the pinned one.
function showTree(number = pinned ? Math.min(shown, trees.length - 1) : trees.length - 1) {
  const follows = atEnd(), tree = trees[number];
  shown = number;
  pinned = number < trees.length - 1;
  $("tree").hidden = false;
  const accepted = `${tree.path.length - 1} of ${count(tree.texts.length - 1, "draft token")} accepted`;
  $("tree").firstElementChild.textContent = `Draft tree: ${accepted}`;
  $("step").textContent = `Tree ${number + 1} of ${trees.length}`;
  $("earlier").disabled = number === 0;
  $("later").disabled = number === trees.length - 1;
  draw($("drawing"), tree);
  if (follows) toEnd(); // the panel shrinks the message area
}

function send(event) {
  event?.preventDefault();
  const content = $("input").value.trim();
  if (!content || running) return;
  const { messages: before, title } = current, edit = edited;
  const kept = before.slice(0, edit?.index ?? before.length);
  if (!kept.length) current.title = content.replace(/\s+/g, " ").slice(0, 100);
  current.messages = [...kept, { role: "user", content }];
  endEdit();
  $("input").focus();
  reply({ before, words: content, title, edit });
}

function regenerate() {
  const before = current.messages;
  if (before.at(-1).role === "assistant") current.messages = before.slice(0, -1);
  reply({ before });
}

// -- setup ----------------------------------------------------------------------------------

const stored = store.read("settings", {});
const kept = stored && typeof stored === "object" ? stored : {};
for (const id of SETTINGS) {
  const input = $(id);
  const field = input.type === "checkbox" ? "checked" : "value";
  if (id in kept) input[field] = kept[id];
  input.addEventListener("change", () => {
    if (input.value === "") input.value = input.defaultValue;
    if (!input.validity.valid) { // clamp to what the server accepts
      const value = input.step === "any" ? Number(input.value) : Math.round(input.value);
      input.value = Math.min(input.max, Math.max(input.min, value));
      notify(`${input.parentElement.textContent.trim()}: must be ${input.min} to ${input.max}; set to ${input.value}.`);
    }
    store.write("settings", Object.fromEntries(SETTINGS.map((name) => {
      const one = $(name);
      return [name, one.type === "checkbox" ? one.checked : one.value];
    })));
    applySettings();
  });
}
applySettings();

function applySettings() {
  document.body.classList.toggle("colored", $("colored").checked);
  $("compare").disabled = !$("speculate").checked; // plain decoding is not compared with itself
}

function dark(on) {
  document.documentElement.style.colorScheme = on ? "dark" : "light";
  $("dark").setAttribute("aria-pressed", String(on));
}
dark(store.read("dark", matchMedia("(prefers-color-scheme: dark)").matches));
$("dark").addEventListener("click", () => {
  const on = $("dark").getAttribute("aria-pressed") === "false";
  dark(on);
  store.write("dark", on);
});

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => { running?.stop(); $("input").focus(); });
$("export").addEventListener("click", save);
$("tree").open = store.read("tree", false);
$("tree").firstElementChild.addEventListener("click", () => {
  store.write("tree", !$("tree").open); // the click toggles it afterwards
  if (atEnd()) requestAnimationFrame(toEnd); // the panel shrinks the message area
});
$("earlier").addEventListener("click", () => showTree(shown - 1));
$("later").addEventListener("click", () => showTree(shown + 1));
$("search").addEventListener("input", showList);
$("new").addEventListener("click", begin);
$("menu").addEventListener("click", () => toggleSide(!$("side").classList.contains("shown")));
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if ($("side").classList.contains("shown")) { toggleSide(false); $("menu").focus(); }
    else if (edited !== null) endEdit();
    else if (running) running.stop();
    else if (!watching) notify(null);
    $("tip").hidden = true;
  }
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); begin(); }
});
// Tooltips with probabilities, on hover or tap.
for (const kind of ["pointerover", "click"]) {
  document.addEventListener(kind, (event) => {
    const over = event.target.closest("[data-tip]");
    $("tip").hidden = !over;
    if (!over) return;
    $("tip").textContent = over.dataset.tip;
    const box = over.getBoundingClientRect();
    $("tip").style.left = `${Math.max(0, Math.min(box.left, innerWidth - $("tip").offsetWidth))}px`;
    $("tip").style.top = `${Math.max(0, box.top - $("tip").offsetHeight - 2)}px`;
  });
}
fill(sessionStorage.getItem("eagle.input") ?? "");
$("input").addEventListener("input", keepInput);
const last = conversations.find((one) => one.id && one.id === store.read("open"));
if (last) open(last);
else begin();
about();
