/** Server-sent events, as far as this server uses them: one `data:` line each. */

const PREFIX = "data: ";

/** Yield the data of each event of a stream. */
export async function* readEvents(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop()!;
      for (const line of lines) {
        if (line.startsWith(PREFIX)) yield line.slice(PREFIX.length);
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}
