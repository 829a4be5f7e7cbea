/** What the server offers to a page: the model's name, its health, streamed completions. */

import { readEvents } from "./events";

export type Role =
  | "bos" | "sentinel" | "context" | "prefix" | "suffix" | "increment" | "raw";

/** A part of a prompt; texts[i] is what token_ids[i] stands for. */
export interface Segment {
  role: Role;
  token_ids: number[];
  texts: string[];
}

/** A prompt's tokens; the last healed_tokens of them are written again by the model. */
export interface Report {
  segments: Segment[];
  healed_tokens: number;
  psm: { prompt_tokens: number; cached_tokens: number } | null;
}

/** How the server laid out a prompt, and what it found in its cache. */
export interface PromptInfo {
  layout: "psm" | "spm" | "efim" | "verbatim" | "prefix-only";
  cached_tokens: number;
  computed_tokens: number;
  sentinels: boolean;
  report: Report;
}

export interface GeneratedToken {
  text: string;
  logprob: number;
}

export interface Chunk {
  text: string;
  tokens: GeneratedToken[];
  finished: boolean;
  prompt: PromptInfo | undefined;
}

export interface Question {
  prompt: string;
  suffix: string;
  lines: "single" | "block" | "all";
}

export interface Model {
  id: string;
  max_model_len: number;
  midfill: { sentinels: boolean };
}

/** The server answered with an error. */
export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly retryAfter: number | undefined,
  ) {
    super(message);
  }
}

/** Nothing answered at all. */
export class UnreachableError extends Error {}

const MAX_TOKENS = 96;
const HEALTH_TIMEOUT = 4000; // milliseconds

export class Server {
  key = "";

  /** Return what is served. */
  async model(): Promise<Model> {
    const response = await this.fetch("v1/models", {});
    const list = (await response.json()) as { data: [Model] };
    return list.data[0];
  }

  /** Return when the server accepts requests; throw as long as it does not. */
  async checkHealth(): Promise<void> {
    await this.fetch("health", { signal: AbortSignal.timeout(HEALTH_TIMEOUT) });
  }

  /** Yield the answer to a question in pieces. */
  async *complete(question: Question, signal: AbortSignal): AsyncGenerator<Chunk> {
    const response = await this.fetch("v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({
        prompt: question.prompt,
        suffix: question.suffix,
        max_tokens: MAX_TOKENS,
        temperature: 0,
        stream: true,
        logprobs: 0,
        midfill: { lines: question.lines, report: "tokens" },
      }),
      signal,
    });
    try {
      for await (const event of readEvents(response.body!)) {
        // Reading goes on to the stream's end, so that its connection is used again.
        if (event !== "[DONE]") yield readChunk(JSON.parse(event));
      }
    } catch (error) {
      throw asUnreachable(error);
    }
  }

  private async fetch(path: string, options: RequestInit): Promise<Response> {
    const headers = new Headers(options.headers);
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      throw asUnreachable(error);
    }
    if (!response.ok) throw await readError(response);
    return response;
  }
}

/** fetch rejects with a TypeError where there is no connection, or where it breaks off. */
function asUnreachable(error: unknown): unknown {
  const gone = error instanceof TypeError ||
    (error instanceof DOMException && error.name === "TimeoutError");
  return gone ? new UnreachableError(String(error)) : error;
}

async function readError(response: Response): Promise<ServerError> {
  const text = await response.text();
  const retryAfter = Number(response.headers.get("retry-after")) || undefined;
  let message = `the server answered with status ${response.status}`;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.status ?? message;
  } catch {
    // Not this server's JSON: the status says all that is known.
  }
  return new ServerError(message, response.status, retryAfter);
}

function readChunk(event: any): Chunk {
  if (event.error) throw new ServerError(event.error.message, 500, undefined);
  const choice = event.choices[0];
  const texts: string[] = choice.logprobs?.tokens ?? [];
  const logprobs: number[] = choice.logprobs?.token_logprobs ?? [];
  return {
    text: choice.text,
    tokens: texts.map((text, index) => ({ text, logprob: logprobs[index] ?? 0 })),
    finished: choice.finish_reason !== null,
    prompt: event.midfill,
  };
}
