/** A prompt and its answer as blocks of tokens, each with where it came from. */

import type { GeneratedToken, PromptInfo, Role } from "./server";

/** "again" is the end of the text before the caret that is not in the prompt, but written again. */
export type Origin = "cached" | "computed" | "generated" | "again";

export interface MapToken {
  text: string;
  origin: Origin;
  /** Number in the prompt and the answer, from 0. */
  index: number;
  id: number | undefined;
  probability: number | undefined;
}

export type BlockName =
  | "context" | "head" | "prefix" | "suffix" | "increment" | "prompt" | "answer";

export interface Block {
  name: BlockName;
  /** FIM tokens before the text. */
  sentinels: MapToken[];
  tokens: MapToken[];
  /** Whether the text before the caret is cut in two before this block. */
  afterCut: boolean;
}

/** Return the blocks of a prompt in the order in which the model reads them, and the answer. */
export function blocksOf(prompt: PromptInfo, answer: readonly GeneratedToken[]): Block[] {
  const { segments, healed_tokens } = prompt.report;
  const total = segments.reduce((sum, segment) => sum + segment.token_ids.length, 0);
  const isCut = segments.some((segment) => segment.role === "increment");
  const blocks: Block[] = [];
  let sentinels: MapToken[] = [];
  let index = 0;
  for (const { role, token_ids, texts } of segments) {
    const tokens = texts.map((text, place) => {
      const origin = originOf(index, prompt.cached_tokens, total - healed_tokens);
      return { text, origin, index: index++, id: token_ids[place], probability: undefined };
    });
    if (role === "sentinel" || role === "bos") {
      sentinels.push(...tokens);
      continue;
    }
    const name = nameOf(role, isCut);
    const last = blocks.at(-1);
    if (last?.name === name) {
      last.tokens.push(...sentinels, ...tokens);
    } else {
      const afterCut = last?.name === "head" && role === "suffix";
      blocks.push({ name, sentinels, tokens, afterCut });
    }
    sentinels = [];
  }
  const tokens = answer.map(({ text, logprob }): MapToken => {
    const probability = Math.exp(logprob);
    return { text, origin: "generated", index: index++, id: undefined, probability };
  });
  if (sentinels.length + tokens.length > 0) {
    blocks.push({ name: "answer", sentinels, tokens, afterCut: false });
  }
  return blocks;
}

function originOf(index: number, cached: number, sent: number): Origin {
  if (index < cached) return "cached";
  return index < sent ? "computed" : "again";
}

function nameOf(role: Role, isCut: boolean): BlockName {
  if (role === "prefix") return isCut ? "head" : "prefix";
  if (role === "raw") return "prompt";
  return role as BlockName;
}

/** Return where lines begin among tokens; a token with a line break ends its line. */
export function lineStarts(tokens: readonly MapToken[]): number[] {
  const starts = [0];
  tokens.forEach((token, place) => {
    if (token.text.includes("\n") && place + 1 < tokens.length) starts.push(place + 1);
  });
  return starts;
}
