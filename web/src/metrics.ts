/** The server's metrics, as it writes them for Prometheus. */

export interface Sample {
  labels: ReadonlyMap<string, string>;
  value: number;
}

/** All samples of one moment by their metric's name. */
export type Metrics = ReadonlyMap<string, readonly Sample[]>;

const LINE = /^([\w:]+)(?:\{([^}]*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples of a text in Prometheus' format; other lines are passed over. */
export function parseMetrics(text: string): Metrics {
  const found = new Map<string, Sample[]>();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (match === null) continue;
    const [, name = "", labels = "", value = ""] = match;
    const pairs = [...labels.matchAll(LABEL)].map(([, key = "", one = ""]) => [key, one] as const);
    const sample = { labels: new Map(pairs), value: Number(value.replace("Inf", "Infinity")) };
    found.set(name, [...(found.get(name) ?? []), sample]);
  }
  return found;
}

/** Return a metric's value, summed over its labels; 0 if the server has none. */
export function total(metrics: Metrics, name: string): number {
  return (metrics.get(`midfill:${name}`) ?? []).reduce((sum, { value }) => sum + value, 0);
}

/** Return a histogram's cumulative counts by their upper bounds. */
export function cumulativeCounts(metrics: Metrics, name: string): Map<number, number> {
  const counts = new Map<number, number>();
  for (const { labels, value } of metrics.get(`midfill:${name}_bucket`) ?? []) {
    const bound = Number((labels.get("le") ?? "").replace("Inf", "Infinity"));
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return counts;
}
