/** Whether the server can be used, and one line about it where it can't. */

import { type Model, type Server, ServerError, UnreachableError } from "./server";

const RETRY = 1000; // milliseconds
const CHECK = 5000;
const TOO_BUSY = 429;
const UNAVAILABLE = 503;
const UNAUTHORIZED = 401;

export interface ConnectionOptions {
  /** Called with one line for the user; "" when there is nothing to say. */
  onNotice: (text: string) => void;
  /** Called when the server wants an API key; `refused` says whether it got a wrong one. */
  onKeyNeeded: (refused: boolean) => void;
  /** Called when the server can be used, for the first time or again. */
  onReady: (model: Model) => void;
}

export class Connection {
  private timer: number | undefined;

  constructor(private readonly server: Server, private readonly options: ConnectionOptions) {
    document.addEventListener("visibilitychange", () => {
      if (this.ready && !document.hidden) void this.check();
    });
  }

  ready = false;

  /** Find out whether the server can be used; keep trying until it can. */
  async connect(): Promise<void> {
    try {
      await this.server.checkHealth();
      const model = await this.server.model();
      this.ready = true;
      this.options.onNotice("");
      this.options.onReady(model);
      this.plan(CHECK, () => this.check());
    } catch (error) {
      this.report(error);
    }
  }

  /** Tell the user what went wrong, and try again where that may help. */
  report(error: unknown): void {
    const { onNotice, onKeyNeeded } = this.options;
    if (error instanceof ServerError && error.status === UNAUTHORIZED) {
      window.clearTimeout(this.timer);
      this.ready = false;
      onNotice("");
      onKeyNeeded(this.server.key !== "");
    } else if (error instanceof UnreachableError) {
      this.retry("The server doesn't answer. Your text stays here; trying again every second.");
    } else if (error instanceof ServerError && error.status === UNAVAILABLE) {
      this.retry("The engine is starting again. Your text stays here; trying again every second.");
    } else if (error instanceof ServerError && error.status === TOO_BUSY) {
      const seconds = error.retryAfter ?? 1;
      this.retry("The server is busy; trying again in a moment.", seconds * 1000);
    } else {
      onNotice(sentence(error));
    }
  }

  private retry(notice: string, after = RETRY): void {
    this.ready = false;
    this.options.onNotice(notice);
    this.plan(after, () => this.connect());
  }

  private async check(): Promise<void> {
    try {
      if (!document.hidden) await this.server.checkHealth();
      this.plan(CHECK, () => this.check());
    } catch (error) {
      this.report(error);
    }
  }

  private plan(after: number, next: () => Promise<void>): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void next(), after);
  }
}

function sentence(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}
