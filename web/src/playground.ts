/** The playground: puts the editor, the reuse map and the session together. */

import { type Answered, Asking } from "./asking";
import { Connection } from "./connection";
import { byId, count } from "./dom";
import { Editor } from "./editor";
import { readText } from "./files";
import { type LanguageId, languageOf, LANGUAGES } from "./languages";
import { ReuseMap } from "./reuse_map";
import { sampleOf } from "./samples";
import { type Model, type Question, Server } from "./server";
import { Session } from "./session";
import { load, store } from "./storage";
import { suggest, suggestedText } from "./suggestion";
import { themeSwitch } from "./theme";

const nonce = document.querySelector<HTMLElement>("[nonce]")!.nonce;
const language = byId<HTMLSelectElement>("language");
const lines = byId<HTMLSelectElement>("lines");
const keyForm = byId<HTMLFormElement>("key-form");
const keyInput = byId<HTMLInputElement>("key");
const fileInput = byId<HTMLInputElement>("file");
const notice = byId("notice");

const server = new Server();
const map = new ReuseMap();
const session = new Session();
const counted = new WeakSet<object>(); // prompts that the session has
let pristine = true; // whether the text is a sample that nobody has touched

const editor = new Editor(byId("editor"), {
  nonce,
  onNewDocument: startDocument,
  onEdit: (_, since) => {
    pristine = false;
    say("file", "");
    ask(since);
  },
  onMove: () => asking.cancel(),
  onAsk: (_, since) => ask(since),
  onFile: (file) => void open(file),
});

const asking = new Asking({
  server,
  lines: () => lines.value as Question["lines"],
  onAnswer: show,
  onError: (error) => connection.report(error),
});

const connection = new Connection(server, {
  onNotice: (text) => say("server", text),
  onKeyNeeded: askForKey,
  onReady: greet,
});

function ask(since = performance.now()): void {
  if (editor.view.state.doc.length === 0) asking.cancel(); // nothing to go by
  else if (connection.ready) void asking.ask(editor.view, since);
}

/** Forget what was shown of the document before. */
function startDocument(): void {
  asking.cancel();
  map.clear();
  session.startDocument();
}

function show(answered: Answered): void {
  map.show(answered.prompt, answered.tokens);
  session.showSpeed(answered);
  if (!counted.has(answered.prompt)) {
    counted.add(answered.prompt);
    session.add(answered);
  }
  if (answered.finished) {
    say("server", "");
    byId("announcement").textContent = suggestedText(editor.view);
  }
}

/** Show one line about the server or a file; "" takes away what was said about the same. */
function say(about: "server" | "file", text: string): void {
  if (text === "" && notice.dataset.about !== about) return;
  notice.dataset.about = about;
  notice.textContent = text;
  notice.hidden = text === "";
}

function greet(model: Model): void {
  const blind = model.midfill.sentinels ? "" : ": sees only the text before the caret";
  byId("model").textContent = `${model.id}${blind}`;
  byId("model").title = `context of ${count(model.max_model_len)} tokens`;
  keyForm.hidden = true;
  store("tab", "key", server.key);
  ask();
}

function askForKey(refused: boolean): void {
  server.key = "";
  store("tab", "key", "");
  keyForm.hidden = false;
  byId("key-label").textContent = refused
    ? "The server doesn't know this API key:"
    : "This server needs an API key:";
  keyInput.value = "";
  keyInput.focus();
}

function loadSample(id: LanguageId): void {
  const { text, caret } = sampleOf(id);
  editor.load(text, caret, id);
  pristine = true;
  ask();
}

async function open(file: File): Promise<void> {
  try {
    const text = await readText(file);
    language.value = languageOf(file.name);
    editor.load(text, 0, language.value as LanguageId);
    pristine = false;
    say("file", "");
    editor.view.focus();
  } catch (error) {
    say("file", (error as Error).message);
  }
}

for (const [id, { name }] of Object.entries(LANGUAGES)) language.append(new Option(name, id));
language.addEventListener("change", () => {
  const id = language.value as LanguageId;
  if (pristine) loadSample(id);
  else editor.setLanguage(id);
});
lines.addEventListener("change", () => {
  suggest(editor.view, "");
  ask();
});
byId("sample").addEventListener("click", () => {
  loadSample(language.value as LanguageId);
  editor.view.focus();
});
byId("open").addEventListener("click", () => fileInput.click());
fileInput.addEventListener("change", () => {
  const file = fileInput.files?.[0];
  if (file !== undefined) void open(file);
  fileInput.value = "";
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  server.key = keyInput.value.trim();
  editor.view.focus();
  void connection.connect();
});
themeSwitch(byId<HTMLButtonElement>("theme"));

server.key = load("tab", "key") ?? "";
loadSample("python");
editor.view.focus();
void connection.connect();
