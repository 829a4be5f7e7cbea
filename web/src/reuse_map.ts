/** The reuse map: the last prompt as the model reads it, each token coloured by its origin. */

import { byId, count, make, plural } from "./dom";
import { type Block, type BlockName, blocksOf, lineStarts, type MapToken } from "./prompt_blocks";
import type { GeneratedToken, PromptInfo } from "./server";
import { termButton } from "./terms";

/** How many lines of a block are shown: those next to where the text is joined. */
const SHOWN_LINES: Record<BlockName, { first: number; last: number }> = {
  context: { first: 2, last: 0 },
  head: { first: 0, last: 2 },
  prefix: { first: 0, last: 6 },
  suffix: { first: 2, last: 0 },
  increment: { first: 0, last: 3 },
  prompt: { first: 0, last: 12 },
  answer: { first: 100, last: 0 },
};
const MIN_FOLDED = 3; // lines; fewer are shown

const NO_PROMPT = "No prompt yet. Type, or press Alt \\ to ask without typing: the prompt is shown "
  + "here as the model reads it, token by token.";

const KINDS = ["cached", "computed", "generated"] as const;
const ORIGINS = {
  cached: "found in the cache",
  computed: "computed",
  generated: "generated",
  again: "computed: written again, to continue a word",
};

export class ReuseMap {
  private readonly map = byId("map");
  private readonly strip = byId("strip");
  private readonly detail = byId("detail");
  private readonly unfolded = new Set<BlockName>();
  private blocks: Block[] = [];
  private tokens: MapToken[] = [];
  private names: BlockName[] = [];
  private current: number | undefined;
  private prompt: PromptInfo | undefined;
  private drawing = 0;
  private readonly hint = this.detail.textContent ?? "";

  constructor() {
    this.map.addEventListener("pointerover", (event) => this.point(tokenAt(event.target)));
    this.map.addEventListener("pointerleave", () => this.point(undefined));
    this.map.addEventListener("keydown", (event) => this.onKey(event));
    this.map.addEventListener("blur", () => this.point(undefined));
    this.draw();
  }

  /** Forget the last prompt, which was of another document. */
  clear(): void {
    cancelAnimationFrame(this.drawing);
    this.blocks = [];
    this.prompt = undefined;
    this.unfolded.clear();
    this.draw();
  }

  /** Show a prompt and its answer with the next frame. */
  show(prompt: PromptInfo, answer: readonly GeneratedToken[]): void {
    cancelAnimationFrame(this.drawing);
    this.drawing = requestAnimationFrame(() => {
      this.blocks = blocksOf(prompt, answer);
      this.draw();
      if (this.prompt !== prompt) this.map.scrollTop = this.map.scrollHeight;
      this.prompt = prompt;
    });
  }

  private draw(): void {
    this.tokens = this.blocks.flatMap((block) => [...block.sentinels, ...block.tokens]);
    this.names = this.blocks.flatMap(({ name, sentinels, tokens }) =>
      [...sentinels, ...tokens].map(() => name),
    );
    const isEmpty = this.blocks.length === 0;
    const drawn = this.blocks.flatMap((block) => this.drawBlock(block));
    this.map.replaceChildren(...(isEmpty ? [make("p", "empty", NO_PROMPT)] : drawn));
    this.strip.replaceChildren(...this.blocks.flatMap(drawStrip));
    this.strip.setAttribute("aria-label", isEmpty ? "no prompt yet" : describe(this.tokens));
    this.detail.hidden = isEmpty;
    for (const kind of KINDS) {
      const number = this.tokens.filter((token) => kindOf(token) === kind).length;
      byId(`count-${kind}`).textContent = count(number);
    }
    this.point(undefined);
  }

  private drawBlock(block: Block): HTMLElement[] {
    const { name, sentinels, tokens, afterCut } = block;
    const size = make("span", "block-size", count(tokens.length));
    const label = make("div", "block-label", termButton(name), size);
    const text = make("div", "block-text", ...sentinels.map(drawSentinel), ...this.fold(block, label));
    const drawn = make("div", `block block-${name}`, label, text);
    return afterCut ? [make("div", "cut", termButton("cut")), drawn] : [drawn];
  }

  /** Return a block's tokens, with a button in the place of lines that are left out. */
  private fold({ name, tokens }: Block, label: HTMLElement): Node[] {
    const starts = lineStarts(tokens);
    const { first, last } = SHOWN_LINES[name];
    const folded = starts.length - first - last;
    if (folded < MIN_FOLDED) return tokens.map(drawToken);
    if (this.unfolded.has(name)) {
      label.append(this.toggle(name, "fold", ""));
      return tokens.map(drawToken);
    }
    // Line breaks are often one token with the next line's blanks: it goes with the next line.
    const from = first === 0 ? 0 : starts[first]! - 1;
    const to = last === 0 ? tokens.length : starts[starts.length - last]! - 1;
    const hidden = tokens.slice(from, to);
    const button = this.toggle(name, `${plural(folded, "line")} more`, mostly(hidden));
    button.title = describe(hidden);
    return [...tokens.slice(0, from).map(drawToken), button, ...tokens.slice(to).map(drawToken)];
  }

  /** Return a button that folds or unfolds a block. */
  private toggle(name: BlockName, text: string, kind: string): HTMLElement {
    const button = make("button", `fold ${kind}`, text);
    button.addEventListener("click", () => {
      if (!this.unfolded.delete(name)) this.unfolded.add(name);
      this.draw();
      this.map.focus();
    });
    return button;
  }

  private onKey(event: KeyboardEvent): void {
    if (event.target !== this.map) return;
    const places = [...this.map.querySelectorAll<HTMLElement>(".token")].map(indexOf);
    const at = this.current === undefined ? places.length : places.indexOf(this.current);
    const steps: Record<string, number> = {
      ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: places.length - 1,
    };
    const to = steps[event.key];
    if (to === undefined || places.length === 0) return;
    event.preventDefault();
    this.point(places[Math.min(Math.max(to, 0), places.length - 1)]);
    this.marked()?.scrollIntoView({ block: "nearest" });
  }

  private marked(): HTMLElement | null {
    return this.map.querySelector(`[data-index="${this.current}"]`);
  }

  /** Describe a token under the map. */
  private point(index: number | undefined): void {
    this.marked()?.classList.remove("current");
    this.current = index;
    const token = index === undefined ? undefined : this.tokens[index];
    if (token === undefined) {
      this.detail.textContent = this.hint;
      return;
    }
    this.marked()?.classList.add("current");
    const facts = [
      `${this.names[token.index]}, token ${count(token.index + 1)} of ${count(this.tokens.length)}`,
      ORIGINS[token.origin],
      ...(token.id === undefined ? [] : [`id ${token.id}`]),
      ...(token.probability === undefined ? [] : [`p ${token.probability.toFixed(2)}`]),
    ];
    this.detail.replaceChildren(make("code", "", visible(token.text)), ` ${facts.join(" · ")}`);
  }
}

function kindOf(token: MapToken): (typeof KINDS)[number] {
  return token.origin === "again" ? "computed" : token.origin;
}

function drawSentinel(token: MapToken): HTMLElement {
  const span = drawToken(token);
  const button = termButton("sentinel", ...span.childNodes);
  button.className = `term sentinel ${span.className}`;
  Object.assign(button.dataset, span.dataset);
  return button;
}

function drawToken(token: MapToken): HTMLElement {
  const span = make("span", `token ${token.origin}`);
  span.dataset.index = `${token.index}`;
  token.text.split("\n").forEach((line, number) => {
    if (number > 0) span.append(make("span", "line-break", "↵"), "\n");
    span.append(line);
  });
  return span;
}

/** Return a block's part of the strip: one bar for each run of tokens with one origin. */
function drawStrip({ name, sentinels, tokens, afterCut }: Block): HTMLElement[] {
  const bars: HTMLElement[] = [];
  const all = [...sentinels, ...tokens];
  for (let start = 0; start < all.length; ) {
    const kind = kindOf(all[start]!);
    let end = start;
    while (end < all.length && kindOf(all[end]!) === kind) end++;
    const bar = make("span", `run ${kind}`);
    bar.style.flexGrow = `${end - start}`;
    bar.title = `${name}: ${plural(end - start, "token")} ${kind}`;
    bars.push(bar);
    start = end;
  }
  const part = make("span", "part", ...bars);
  part.style.flexGrow = `${all.length}`;
  return afterCut ? [make("span", "strip-cut"), part] : [part];
}

function describe(tokens: readonly MapToken[]): string {
  const kinds = KINDS.map((kind) => {
    const number = tokens.filter((token) => kindOf(token) === kind).length;
    return number ? `${plural(number, "token")} ${kind}` : "";
  });
  return kinds.filter(Boolean).join(", ");
}

/** Return the origin that a run of hidden tokens is shown with: computed if any of them is. */
function mostly(tokens: readonly MapToken[]): string {
  return tokens.some((token) => token.origin === "computed") ? "computed" : "cached";
}

function tokenAt(target: EventTarget | null): number | undefined {
  const element = target instanceof Element ? target.closest<HTMLElement>(".token") : null;
  return element === null ? undefined : indexOf(element);
}

const indexOf = (element: HTMLElement): number => Number(element.dataset.index);

function visible(text: string): string {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  return shown || "(part of a character)";
}
