// The page: conversations kept in the browser, answers streamed from the server that serves this file.
import { render } from "./markdown.js";
import { draw } from "./tree.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "seed", "max_tokens", "drafts", "beside", "coloured", "trees"];
const store = {
  read(key, otherwise) {
    try { return JSON.parse(localStorage.getItem(`eagle.${key}`)) ?? otherwise; } catch { return otherwise; }
  },
  write(key, value) {
    try { localStorage.setItem(`eagle.${key}`, JSON.stringify(value)); }
    catch { say("This browser keeps no more: delete a conversation."); }
  },
};

// What of a stored list can be shown: another page, or an older version of this one, may have written it.
function sound(list) {
  const isMessage = (one) => one && ["user", "assistant"].includes(one.role) && typeof one.content === "string";
  return (Array.isArray(list) ? list : []).filter((one) => one && typeof one.title === "string"
    && Array.isArray(one.messages) && one.messages.every(isMessage));
}

let conversations = sound(store.read("conversations", []));
let current = null; // a conversation: {id, title, messages: [{role, content, marks, figures, plain}]}
let running = null; // what is being answered: {stop}

// -- what is shown ---------------------------------------------------------------------------

function say(words) {
  $("banner").textContent = words ?? "";
  $("banner").hidden = !words;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function copier(text) {
  return element("button", { type: "button", onclick: (event) => {
    const done = () => { event.target.textContent = "Copied"; setTimeout(() => { event.target.textContent = "Copy"; }, 1500); };
    if (navigator.clipboard) navigator.clipboard.writeText(text()).then(done, () => say("Copying is not allowed here."));
    else say("Copying needs https or localhost.");
  } }, "Copy");
}

// One answer, as it comes: its text, and a line of figures.
class Panel {
  constructor(name) {
    this.text = element("div", { class: "text" });
    this.figures = element("div", { class: "figures" });
    this.node = element("section", { "aria-label": name }, element("h2", {}, name), this.text, this.figures);
  }

  show(answer) {
    render(this.text, answer.content, answer.marks, copier);
    const { tokens = 0, steps = 0, seconds = 0, error, waiting } = answer.figures ?? {};
    this.figures.classList.toggle("failed", Boolean(error));
    const parts = [];
    if (waiting) parts.push("waiting for a place ...");
    if (tokens > 1 && seconds) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (steps) parts.push(`τ ${((tokens - 1) / steps).toFixed(2)}`);
    if (tokens) parts.push(`${tokens} tokens`, `${seconds.toFixed(1)} s`);
    if (error) parts.push(error);
    this.figures.textContent = parts.join(" · ");
  }
}

function messageNode(message, index) {
  const last = index === current.messages.length - 1;
  if (message.role === "user") {
    return element("article", { class: "message user" }, element("h2", {}, "You"),
      element("div", { class: "text" }, message.content));
  }
  const panels = [new Panel("Answer")];
  if (message.plain) panels.push(new Panel("Plain decoding, same seed"));
  panels[0].show(message);
  if (message.plain) panels[1].show(message.plain);
  const tools = element("div", { class: "tools" }, copier(() => message.content));
  if (last) tools.append(element("button", { type: "button", onclick: regenerate }, "Regenerate"));
  if (message.verdict) tools.append(message.verdict);
  const node = element("article", { class: `message assistant${message.plain ? " beside" : ""}` },
    element("div", { class: "answers" }, ...panels.map((panel) => panel.node)), tools);
  node.panels = panels;
  return node;
}

function showConversation() {
  $("title").textContent = current.title;
  $("messages").replaceChildren(...current.messages.map(messageNode));
  $("tree").hidden = true;
  $("messages").scrollTop = $("messages").scrollHeight;
  showList();
}

function showList() {
  $("conversations").replaceChildren(...conversations.map((one) => element("li", {},
    element("button", { class: "pick", type: "button", "aria-current": String(one === current), onclick: () => open(one) }, one.title),
    element("button", { type: "button", "aria-label": `Delete ${one.title}`, onclick: () => remove(one) }, "×"))));
}

function keep() {
  store.write("conversations", conversations);
}

// What another tab has kept or deleted; the conversation at hand stays this tab's own.
addEventListener("storage", (event) => {
  if (event.key !== "eagle.conversations") return;
  conversations = sound(store.read("conversations", [])).map((one) => (one.id === current.id ? current : one));
  showList();
});

function open(conversation) {
  running?.stop();
  current = conversation;
  toggleSide(false);
  showConversation();
  $("input").focus();
}

function begin() {
  running?.stop();
  current = { id: `${Date.now()}-${Math.random()}`, title: "New conversation", messages: [] };
  toggleSide(false);
  showConversation();
  $("input").focus();
}

function remove(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  conversation.deleted = true;
  keep();
  if (conversation === current) begin();
  else showList();
}

function toggleSide(shown) {
  $("side").classList.toggle("shown", shown);
  $("menu").setAttribute("aria-expanded", String($("side").classList.contains("shown")));
}

// -- asking the server -----------------------------------------------------------------------

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
    words = "An API key has only letters without accents, digits and signs. The key:";
  }
}

// One answer from the server into `answer`; `seen` is called as it grows.
async function ask(body, answer, signal, seen) {
  answer.figures = { tokens: 0, steps: 0, seconds: 0, waiting: true };
  let first = 0;
  seen();
  try {
    for await (const chunk of events(await post(body, signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content } = choice.delta;
      const step = choice.speculation;
      if (step) {
        const figures = answer.figures;
        figures.waiting = false;
        figures.tokens += step.tokens;
        if (first) figures.steps += 1;
        first ||= performance.now();
        figures.seconds = (performance.now() - first) / 1000;
        if (content) {
          const drafted = step.drafted && content.startsWith(step.text) ? step.text.length : 0;
          if (drafted) answer.marks.push([answer.content.length, answer.content.length + drafted]);
          answer.content += content;
        }
        seen(step.tree);
      }
      if (choice.finish_reason) answer.finish = choice.finish_reason;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.figures.error = error instanceof TypeError ? "the server has gone" : error.message;
      if (error instanceof TypeError) watch();
    }
  }
  answer.figures.waiting = false;
  seen();
}

// The server does not answer: say so until it does.
let watching = null;
function watch() {
  if (watching) return;
  say("The server does not answer. Trying again ...");
  watching = setInterval(async () => {
    try {
      if (!(await fetch("health", { cache: "no-store" })).ok) return;
    } catch { return; }
    clearInterval(watching);
    watching = null;
    say(null);
    about();
  }, 1000);
}

async function about() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) { if (askForKey()) await about(); return; }
    $("model").textContent = (await response.json()).data[0].id;
  } catch { watch(); }
}

function settings() {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  return {
    temperature: number("temperature") ?? 1, top_p: number("top_p") ?? 1, max_tokens: number("max_tokens") ?? 512,
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 31),
  };
}

async function reply() {
  const conversation = current;
  const history = conversation.messages.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (system) history.unshift({ role: "system", content: system });
  const body = { messages: history, stream: true, return_speculation: true, ...settings() };
  const message = { role: "assistant", content: "", marks: [] };
  if ($("beside").checked) message.plain = { content: "", marks: [] };
  conversation.messages.push(message);
  const control = new AbortController();
  const mine = { stop: () => control.abort() };
  running = mine;
  $("send").hidden = true;
  $("stop").hidden = false;
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  keep(); // the question is there after a reload, whatever becomes of the answer
  let kept = performance.now();
  showConversation();
  const node = $("messages").lastElementChild;
  let due = false;
  let tree = null;
  const seen = (newest) => {
    tree = newest ?? tree;
    if (performance.now() - kept > 2000 && !conversation.deleted) {
      kept = performance.now();
      keep();
    }
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (conversation !== current) return;
      const box = $("messages");
      const below = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
      node.panels[0].show(message);
      if (message.plain) node.panels[1].show(message.plain);
      if (tree && $("trees").checked) showTree(tree);
      if (below) box.scrollTop = box.scrollHeight;
    });
  };
  const asked = [ask({ ...body, speculate: $("drafts").value === "on" }, message, control.signal, seen)];
  if (message.plain) asked.push(ask({ ...body, speculate: false }, message.plain, control.signal, () => seen()));
  await Promise.all(asked);
  if (message.plain && !message.figures.error && !message.plain.figures.error && !control.signal.aborted) {
    message.verdict = message.content === message.plain.content ? "texts equal" : "texts differ";
  }
  if (running === mine) {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
  }
  if (!conversation.deleted) keep();
  if (conversation === current) {
    $("messages").lastElementChild.replaceWith(messageNode(message, conversation.messages.length - 1));
    showList();
  }
}

function showTree(tree) {
  $("tree").hidden = false;
  $("treewords").textContent = `last step: ${tree.texts.length} nodes, ${tree.path.length - 1} drafted tokens accepted`;
  draw($("drawing"), tree);
}

function send(event) {
  event?.preventDefault();
  const words = $("input").value.trim();
  if (!words || running) return;
  if (!current.messages.length) current.title = words.slice(0, 60);
  current.messages.push({ role: "user", content: words });
  $("input").value = "";
  reply();
}

function regenerate() {
  if (running) return;
  current.messages.pop();
  reply();
}

// -- everything at its place -----------------------------------------------------------------

const stored = store.read("settings", {});
const kept = stored && typeof stored === "object" ? stored : {};
for (const id of SETTINGS) {
  const input = $(id);
  const field = input.type === "checkbox" ? "checked" : "value";
  if (id in kept) input[field] = kept[id];
  input.addEventListener("change", () => {
    store.write("settings", Object.fromEntries(SETTINGS.map((name) => {
      const one = $(name);
      return [name, one.type === "checkbox" ? one.checked : one.value];
    })));
    document.body.classList.toggle("coloured", $("coloured").checked);
    if (!$("trees").checked) $("tree").hidden = true;
  });
}
document.body.classList.toggle("coloured", $("coloured").checked);

function dark(on) {
  document.documentElement.classList.toggle("dark", on);
  $("dark").setAttribute("aria-pressed", String(on));
}
dark(store.read("dark", matchMedia("(prefers-color-scheme: dark)").matches));
$("dark").addEventListener("click", () => {
  dark(!document.documentElement.classList.contains("dark"));
  store.write("dark", document.documentElement.classList.contains("dark"));
});

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => running?.stop());
$("new").addEventListener("click", begin);
$("menu").addEventListener("click", () => toggleSide(!$("side").classList.contains("shown")));
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.stop();
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); begin(); }
});
begin();
about();
