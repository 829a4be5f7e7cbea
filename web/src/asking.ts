/** Asks for a suggestion after each edit; an edit takes back the question before it. */

import type { EditorView } from "@codemirror/view";
import { type GeneratedToken, type PromptInfo, type Question, type Server } from "./server";
import { suggest, suggestedText } from "./suggestion";

/** What was measured of one question and its answer; times in milliseconds. */
export interface Answered {
  prompt: PromptInfo;
  tokens: GeneratedToken[];
  firstTokenAfter: number;
  tokensPerSecond: number | undefined;
  finished: boolean;
}

export interface AskingOptions {
  server: Server;
  lines: () => Question["lines"];
  /** Called with each piece of an answer; `finished` says whether it is complete. */
  onAnswer: (answered: Answered) => void;
  onError: (error: unknown) => void;
}

/** The name of the measure from a keystroke to the paint of its ghost text. */
export const GHOST_TEXT_MEASURE = "keystroke to ghost text";

const MIN_TOKENS = 4; // fewer say nothing of the speed

export class Asking {
  private abort: AbortController | undefined;

  constructor(private readonly options: AskingOptions) {}

  /** Take back the question in progress. */
  cancel(): void {
    this.abort?.abort();
    this.abort = undefined;
  }

  /**
   * Ask what could stand at the caret.
   *
   * @param since when the key was pressed, as of performance.now()
   */
  async ask(view: EditorView, since: number): Promise<void> {
    this.cancel();
    const caret = view.state.selection.main;
    if (!caret.empty) return;
    const abort = new AbortController();
    this.abort = abort;
    const question = {
      prompt: view.state.sliceDoc(0, caret.head),
      suffix: view.state.sliceDoc(caret.head),
      lines: this.options.lines(),
    };
    try {
      await this.show(view, question, since, abort.signal);
    } catch (error) {
      if (!abort.signal.aborted) this.options.onError(error);
    } finally {
      if (this.abort === abort) this.abort = undefined;
    }
  }

  private async show(
    view: EditorView, question: Question, since: number, signal: AbortSignal,
  ): Promise<void> {
    const asked = performance.now();
    const rate = new Rate();
    let written = "";
    let answered: Answered | undefined;
    let visible = false;
    for await (const chunk of this.options.server.complete(question, signal)) {
      if (signal.aborted) return;
      const now = performance.now();
      written += chunk.text;
      const text = written.replaceAll(/\r\n?/g, "\n"); // as the editor would read it
      rate.add(now, chunk.tokens.length);
      // What is shown already stays as long as the answer may still turn out to be the same.
      if (chunk.finished || !suggestedText(view).startsWith(text)) suggest(view, text);
      if (answered === undefined) {
        if (chunk.prompt === undefined) continue;
        answered = {
          prompt: chunk.prompt,
          tokens: [],
          firstTokenAfter: now - asked,
          tokensPerSecond: undefined,
          finished: false,
        };
      }
      if (text && !visible) measurePaint(since);
      visible ||= text !== "";
      answered = {
        ...answered,
        tokens: [...answered.tokens, ...chunk.tokens],
        tokensPerSecond: rate.perSecond,
        finished: chunk.finished,
      };
      this.options.onAnswer(answered);
    }
  }
}

/** Tokens per second after the first piece, which has waited for the prompt. */
class Rate {
  private first: number | undefined;
  private tokens = 0;
  private last = 0;

  add(time: number, tokens: number): void {
    if (this.first === undefined) this.first = time;
    else this.tokens += tokens;
    this.last = time;
  }

  get perSecond(): number | undefined {
    const seconds = (this.last - (this.first ?? this.last)) / 1000;
    return this.tokens >= MIN_TOKENS && seconds > 0 ? this.tokens / seconds : undefined;
  }
}

/** Record the time until what has just been changed is on the screen. */
function measurePaint(since: number): void {
  requestAnimationFrame(() => {
    setTimeout(() => performance.measure(GHOST_TEXT_MEASURE, { start: since }), 0);
  });
}
