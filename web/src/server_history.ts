/** The server's own record of its last half hour: what a dashboard begins with. */

import type { Metrics } from "./metrics";

/** The server's metrics at one moment, summed over tenants. */
export interface Past {
  age: number; // seconds
  metrics: Metrics;
}

interface Body {
  series: { name: string; le?: string }[];
  samples: { age: number; values: number[] }[];
}

/** Return what the server has recorded, the oldest first; nothing if it can't be read. */
export async function readPast(timeout: number): Promise<Past[]> {
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(timeout) } as const;
    const response = await fetch("metrics/history", options);
    return response.ok ? pastOf((await response.json()) as Body) : [];
  } catch {
    return []; // a server that is gone is said by those who read its metrics
  }
}

function pastOf({ series, samples }: Body): Past[] {
  const labels = series.map(({ le }) => new Map(le === undefined ? [] : [["le", le]]));
  return samples.map(({ age, values }) => {
    const metrics = new Map<string, { labels: Map<string, string>; value: number }[]>();
    series.forEach(({ name }, index) => {
      const sample = { labels: labels[index]!, value: values[index]! };
      const known = metrics.get(name);
      if (known === undefined) metrics.set(name, [sample]);
      else known.push(sample);
    });
    return { age, metrics };
  });
}
