/** What the map's words mean: said beside the word while it is pointed at or has the focus. */

import { make } from "./dom";

/** What a word means, and where /planner says more of it. */
interface Meaning {
  text: string;
  anchor: "the-parts-of-a-prompt" | "the-cut" | "other-text";
}

const MEANINGS = {
  head: {
    text: "The beginning of your text, up to the cut. It stays the same while you type, so what "
      + "the model computed of it is used again.",
    anchor: "the-parts-of-a-prompt",
  },
  prefix: {
    text: "All text before the caret. In this order of the parts it is not cut in two.",
    anchor: "the-parts-of-a-prompt",
  },
  cut: {
    text: "Here the text before the caret is cut in two: the head stands before the suffix, the "
      + "increment after it. The cut stays in its place while you type.",
    anchor: "the-cut",
  },
  suffix: {
    text: "The text after the caret. It stands before the increment, so typing doesn't move it, "
      + "and it isn't computed again.",
    anchor: "the-parts-of-a-prompt",
  },
  increment: {
    text: "The text between the cut and the caret. It is last in the prompt: what you type is "
      + "added at its end, and only that is computed.",
    anchor: "the-parts-of-a-prompt",
  },
  context: {
    text: "Other files that the model is shown. They come first, so that they stay in the cache.",
    anchor: "other-text",
  },
  prompt: {
    text: "Text that the model reads as it was sent, not divided into parts.",
    anchor: "the-parts-of-a-prompt",
  },
  answer: {
    text: "What the model wrote: the suggestion at the caret.",
    anchor: "the-parts-of-a-prompt",
  },
  sentinel: {
    text: "A sentinel: a token that is no text, but tells the model which part follows. There is "
      + "one for the beginning, one for the suffix and one for the middle, where it goes on "
      + "writing. Each model has its own names for them.",
    anchor: "the-parts-of-a-prompt",
  },
} satisfies Record<string, Meaning>;

export type Term = keyof typeof MEANINGS;

const CLOSES_AFTER = 200; // milliseconds in which the pointer may go from the word to its meaning
const GAP = 6; // pixels between them

/** The one meaning that is shown, after its word in the document: Tab goes from one to the other. */
class Explanation {
  private readonly element = make("div", "explanation");
  private shown: HTMLElement | undefined;
  private timer = 0;

  constructor() {
    this.element.id = "explanation";
    this.element.setAttribute("role", "note");
    this.watch(this.element, () => window.clearTimeout(this.timer));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    const follow = () => this.place();
    document.addEventListener("scroll", follow, { capture: true, passive: true });
  }

  explain(word: HTMLElement, term: Term): void {
    word.setAttribute("aria-describedby", this.element.id);
    this.watch(word, () => this.open(word, term));
    word.addEventListener("click", () => this.open(word, term));
  }

  /** Call a function when the pointer or the focus comes to an element; close when both left. */
  private watch(element: HTMLElement, onEnter: () => void): void {
    for (const entering of ["pointerenter", "focusin"]) element.addEventListener(entering, onEnter);
    for (const leaving of ["pointerleave", "focusout"]) {
      element.addEventListener(leaving, () => this.closeSoon());
    }
  }

  private open(word: HTMLElement, term: Term): void {
    window.clearTimeout(this.timer);
    if (this.shown === word && this.element.isConnected) return;
    const { text, anchor } = MEANINGS[term];
    const link = make("a", "", "How the planner works");
    link.setAttribute("href", `/planner#${anchor}`);
    link.setAttribute("target", "_blank");
    this.element.replaceChildren(text, " ", link);
    this.shown = word;
    word.after(this.element);
    this.place();
  }

  /** Stand below the word, or above it where there is no room, inside the window. */
  private place(): void {
    if (this.shown === undefined) return;
    const word = this.shown.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const below = word.bottom + GAP;
    const top = below + height < window.innerHeight ? below : word.top - GAP - height;
    const left = Math.max(GAP, Math.min(word.left, window.innerWidth - width - GAP));
    this.element.style.top = `${top}px`;
    this.element.style.left = `${left}px`;
  }

  private closeSoon(): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      const { shown, element } = this;
      const inUse = [shown, element].some((one) => one?.matches(":hover, :focus-within"));
      if (!inUse) this.close();
    }, CLOSES_AFTER);
  }

  private close(): void {
    window.clearTimeout(this.timer);
    this.element.remove();
    this.shown = undefined;
  }
}

let explanation: Explanation | undefined;

/** Return a word of the map as a button that says what it means. */
export function termButton(term: Term, ...content: (Node | string)[]): HTMLElement {
  const button = make("button", "term", ...(content.length > 0 ? content : [term]));
  button.setAttribute("type", "button");
  explanation ??= new Explanation();
  explanation.explain(button, term);
  return button;
}
