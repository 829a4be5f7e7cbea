/** Ghost text at the caret: shown while it fits what is typed, accepted whole or in parts. */

import { isolateHistory } from "@codemirror/commands";
import { type Extension, Prec, StateEffect, StateField, Transaction } from "@codemirror/state";
import {
  type Command, Decoration, type DecorationSet, EditorView, keymap, WidgetType,
} from "@codemirror/view";
import { firstLine, firstWord } from "./pieces";

/** A suggestion: text that could stand at a place in the document. */
interface Suggestion {
  place: number;
  text: string;
}

const TAB_LEAVES = 2000; // milliseconds after Escape

const setSuggestion = StateEffect.define<Suggestion | null>();

class GhostText extends WidgetType {
  constructor(private readonly text: string) {
    super();
  }

  override eq(other: GhostText): boolean {
    return other.text === this.text;
  }

  override toDOM(): HTMLElement {
    const span = document.createElement("span");
    span.className = "ghost";
    span.setAttribute("aria-hidden", "true");
    span.textContent = this.text;
    return span;
  }

  override get lineBreaks(): number {
    return this.text.split("\n").length - 1;
  }
}

const field = StateField.define<Suggestion | null>({
  create: () => null,
  update(shown, transaction) {
    for (const effect of transaction.effects) {
      if (effect.is(setSuggestion)) return effect.value?.text ? effect.value : null;
    }
    if (shown === null || !(transaction.docChanged || transaction.selection)) return shown;
    return remaining(shown, transaction);
  },
  provide: (own) => EditorView.decorations.from(own, decorate),
});

/** Return what is left of a suggestion after its beginning was typed; null after other changes. */
function remaining(shown: Suggestion, transaction: Transaction): Suggestion | null {
  const caret = transaction.state.selection.main;
  const typed = caret.head - shown.place;
  if (!caret.empty || typed < 0) return null;
  const text = transaction.state.sliceDoc(shown.place, caret.head);
  const grown = transaction.newDoc.length - transaction.startState.doc.length === typed;
  if (!grown || !shown.text.startsWith(text)) return null;
  const rest = shown.text.slice(typed);
  return rest ? { place: caret.head, text: rest } : null;
}

function decorate(shown: Suggestion | null): DecorationSet {
  if (shown === null) return Decoration.none;
  const widget = Decoration.widget({ widget: new GhostText(shown.text), side: 1 });
  return Decoration.set(widget.range(shown.place));
}

/** Return the text that is suggested at the caret; "" if there is none. */
export function suggestedText(view: EditorView): string {
  return view.state.field(field)?.text ?? "";
}

/** Suggest a text at the caret; "" takes a suggestion away. */
export function suggest(view: EditorView, text: string): void {
  const place = view.state.selection.main.head;
  view.dispatch({ effects: setSuggestion.of({ place, text }) });
}

/** Return the command that inserts the part of the suggestion that `part` takes of it. */
function accept(part: (text: string) => string): Command {
  return (view) => {
    const shown = view.state.field(field);
    if (shown === null) return false;
    const insert = part(shown.text);
    view.dispatch({
      changes: { from: shown.place, insert },
      selection: { anchor: shown.place + insert.length },
      annotations: isolateHistory.of("full"),
      userEvent: "input.complete",
      scrollIntoView: true,
    });
    return true;
  };
}

const dismiss: Command = (view) => {
  if (view.state.field(field) === null) return false;
  view.dispatch({ effects: setSuggestion.of(null) });
  view.setTabFocusMode(TAB_LEAVES); // as the editor does after an Escape that it has no use for
  return true;
};

/** Return the extension. */
export function suggestions(): Extension {
  const keys = keymap.of([
    { key: "Tab", run: accept((text) => text) },
    { key: "Ctrl-ArrowRight", mac: "Cmd-ArrowRight", run: accept(firstWord) },
    { key: "Shift-Tab", run: accept(firstLine) },
    { key: "Escape", run: dismiss },
  ]);
  return [field, Prec.highest(keys)];
}
