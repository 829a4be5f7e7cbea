/** The editor: CodeMirror with one compartment for the language. */

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import {
  bracketMatching, indentOnInput, syntaxHighlighting,
} from "@codemirror/language";
import { Compartment, type Extension, Transaction } from "@codemirror/state";
import {
  drawSelection, EditorView, highlightSpecialChars, keymap, lineNumbers, type ViewUpdate,
} from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";
import { LANGUAGES, type LanguageId } from "./languages";
import { suggestions } from "./suggestion";

const COMPOSED = 60; // milliseconds after which the editor has what an input method wrote
const FRESH = 250; // milliseconds for which an edit counts as caused by the last key

export interface EditorOptions {
  /** Called when all of the text was replaced or deleted, by whomever. */
  onNewDocument: () => void;
  /** Called after an edit by the user, with the time of the key that made it. */
  onEdit: (view: EditorView, since: number) => void;
  /** Called when what was asked is of no use: the caret has moved, a character is unfinished. */
  onMove: () => void;
  /** Called when the user asks for a suggestion. */
  onAsk: (view: EditorView, since: number) => void;
  onFile: (file: File) => void;
  nonce: string;
}

export class Editor {
  readonly view: EditorView;
  private readonly language = new Compartment();
  private pressed = 0;

  constructor(parent: HTMLElement, private readonly options: EditorOptions) {
    this.view = new EditorView({ parent, extensions: this.extensions() });
  }

  /** Replace the whole text; this is no edit of the user. */
  load(text: string, caret: number, language: LanguageId): void {
    const { view } = this;
    view.dispatch({
      changes: { from: 0, to: view.state.doc.length, insert: text },
      effects: this.language.reconfigure(LANGUAGES[language].extension()),
      annotations: Transaction.userEvent.of("load"),
    });
    // A text with other line breaks is as long as CodeMirror says.
    const anchor = Math.min(caret, view.state.doc.length);
    const effects = EditorView.scrollIntoView(anchor, { y: "center" });
    view.dispatch({ selection: { anchor }, effects });
  }

  setLanguage(language: LanguageId): void {
    const effects = this.language.reconfigure(LANGUAGES[language].extension());
    this.view.dispatch({ effects });
  }

  private extensions(): Extension {
    const { onAsk, nonce } = this.options;
    const ask = (view: EditorView) => {
      onAsk(view, this.pressed);
      return true;
    };
    return [
      lineNumbers(),
      highlightSpecialChars(),
      history(),
      drawSelection(),
      indentOnInput(),
      bracketMatching(),
      syntaxHighlighting(classHighlighter),
      suggestions(),
      keymap.of([
        { key: "Alt-\\", run: ask },
        { key: "Ctrl-Space", run: ask },
        indentWithTab,
        ...defaultKeymap,
        ...historyKeymap,
      ]),
      this.language.of([]),
      EditorView.cspNonce.of(nonce),
      EditorView.contentAttributes.of({ "aria-label": "Text", "aria-describedby": "keys" }),
      EditorView.updateListener.of((update) => this.onUpdate(update)),
      EditorView.domEventHandlers({
        keydown: (event) => {
          this.pressed = event.timeStamp;
          return false;
        },
        compositionend: () => {
          window.setTimeout(() => this.onEdit(), COMPOSED);
          return false;
        },
        drop: (event) => this.onDrop(event),
      }),
    ];
  }

  private onUpdate(update: ViewUpdate): void {
    if (replacesAll(update)) this.options.onNewDocument();
    if (update.transactions.some((one) => one.isUserEvent("load"))) return;
    if (update.docChanged) this.onEdit();
    else if (update.selectionSet) this.options.onMove();
  }

  private onEdit(): void {
    if (this.view.composing) {
      this.options.onMove(); // ghost text would disturb the input method
      return;
    }
    const now = performance.now();
    this.options.onEdit(this.view, now - this.pressed < FRESH ? this.pressed : now);
  }

  private onDrop(event: DragEvent): boolean {
    const file = event.dataTransfer?.files[0];
    if (file === undefined) return false;
    event.preventDefault();
    this.options.onFile(file);
    return true;
  }
}

function replacesAll({ changes, startState }: ViewUpdate): boolean {
  let all = false;
  changes.iterChangedRanges((from, to) => {
    all ||= from === 0 && to === startState.doc.length;
  });
  return all;
}
