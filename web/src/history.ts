/** Metrics over time: rates, ratios and percentiles of the last seconds. */

import { cumulativeCounts, type Metrics, total } from "./metrics";

interface Moment {
  time: number; // seconds
  metrics: Metrics;
}

export class History {
  private readonly moments: Moment[] = [];

  /** @param span seconds that are remembered, and that rates and percentiles are of */
  constructor(private readonly span: number) {}

  add(time: number, metrics: Metrics): void {
    this.moments.push({ time, metrics });
    while (this.moments[0]!.time < time - this.span) this.moments.shift();
  }

  /** Return a gauge's value. */
  now(name: string): number | undefined {
    const last = this.moments.at(-1);
    return last && total(last.metrics, name);
  }

  /** Return a counter's growth per second. */
  rate(name: string): number | undefined {
    const seconds = (this.moments.at(-1)?.time ?? 0) - (this.moments[0]?.time ?? 0);
    return seconds > 0 ? this.growth((metrics) => total(metrics, name)) / seconds : undefined;
  }

  /** Return a counter's growth as a share of another's. */
  ratio(part: string, whole: string): number | undefined {
    const grown = this.growth((metrics) => total(metrics, whole));
    return grown > 0 ? this.growth((metrics) => total(metrics, part)) / grown : undefined;
  }

  /** Return a percentile of a histogram's new values, interpolated inside its bucket. */
  percentile(name: string, share: number): number | undefined {
    const last = this.moments.at(-1);
    if (last === undefined) return undefined;
    const bounds = [...cumulativeCounts(last.metrics, name).keys()].sort((a, b) => a - b);
    const below = bounds.map((bound) =>
      this.growth((metrics) => cumulativeCounts(metrics, name).get(bound) ?? 0),
    );
    const all = below.at(-1) ?? 0;
    if (all === 0) return undefined;
    const wanted = share * all;
    const place = below.findIndex((count) => count >= wanted);
    const [from, to] = [bounds[place - 1] ?? 0, bounds[place]!];
    if (to === Infinity) return from;
    const before = below[place - 1] ?? 0;
    return from + ((wanted - before) / (below[place]! - before)) * (to - from);
  }

  /** Return by how much a counter has grown; one that is smaller than before began again at 0. */
  private growth(value: (metrics: Metrics) => number): number {
    const values = this.moments.map(({ metrics }) => value(metrics));
    return values.slice(1).reduce((sum, now, index) => {
      const before = values[index]!;
      return sum + (now < before ? now : now - before);
    }, 0);
  }
}
