/** Metrics over time: rates, ratios and percentiles of the last seconds. */

import { cumulativeCounts, type Metrics, total } from "./metrics";

interface Moment {
  time: number; // seconds
  metrics: Metrics;
}

export class History {
  /**
   * @param span seconds that are remembered, and that rates and percentiles are of
   * @param tenant whose numbers to return; everybody's if it is left out
   */
  constructor(
    private readonly span: number,
    private readonly tenant?: string,
    private readonly moments: Moment[] = [],
  ) {}

  /** Return one tenant's part, which goes on with this history. */
  of(tenant: string): History {
    return new History(this.span, tenant, this.moments);
  }

  add(time: number, metrics: Metrics): void {
    this.moments.push({ time, metrics });
    while (this.moments[0]!.time < time - this.span) this.moments.shift();
  }

  /** Return a gauge's value. */
  now(name: string): number | undefined {
    const last = this.moments.at(-1);
    return last && this.total(last.metrics, name);
  }

  /** Return a counter's growth per second. */
  rate(name: string): number | undefined {
    const seconds = (this.moments.at(-1)?.time ?? 0) - (this.moments[0]?.time ?? 0);
    return seconds > 0 ? this.growth((metrics) => this.total(metrics, name)) / seconds : undefined;
  }

  /** Return a counter's growth as a share of another's. */
  ratio(part: string, whole: string): number | undefined {
    const grown = this.growth((metrics) => this.total(metrics, whole));
    return grown > 0 ? this.growth((metrics) => this.total(metrics, part)) / grown : undefined;
  }

  /** Return a percentile of a histogram's new values, interpolated inside its bucket. */
  percentile(name: string, share: number): number | undefined {
    const last = this.moments.at(-1);
    if (last === undefined) return undefined;
    const counts = (metrics: Metrics) => cumulativeCounts(metrics, name, this.tenant);
    const bounds = [...counts(last.metrics).keys()].sort((a, b) => a - b);
    const below = bounds.map((bound) =>
      this.growth((metrics) => counts(metrics).get(bound) ?? 0),
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

  private total(metrics: Metrics, name: string): number {
    return total(metrics, name, this.tenant);
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
