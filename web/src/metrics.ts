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

/** Return the names of all tenants in their order; one empty name if the server has no keys. */
export function tenants(metrics: Metrics): string[] {
  const samples = metrics.get("midfill:num_requests_running") ?? [];
  return samples.map(({ labels }) => labels.get("tenant") ?? "");
}

/** Return a metric's samples, or those of one tenant. */
function samples(metrics: Metrics, name: string, tenant?: string): readonly Sample[] {
  const all = metrics.get(`midfill:${name}`) ?? [];
  return tenant === undefined ? all : all.filter(({ labels }) => labels.get("tenant") === tenant);
}

/** Return a metric's value, summed over its labels; 0 if the server has none. */
export function total(metrics: Metrics, name: string, tenant?: string): number {
  return samples(metrics, name, tenant).reduce((sum, { value }) => sum + value, 0);
}

/** Return a histogram's cumulative counts by their upper bounds. */
export function cumulativeCounts(
  metrics: Metrics, name: string, tenant?: string,
): Map<number, number> {
  const counts = new Map<number, number>();
  for (const { labels, value } of samples(metrics, `${name}_bucket`, tenant)) {
    const bound = Number((labels.get("le") ?? "").replace("Inf", "Infinity"));
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return counts;
}
