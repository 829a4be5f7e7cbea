/** What the dashboard shows: each panel's lines, and where their values come from. */

import { count } from "./dom";
import type { History } from "./history";

/** A line of a panel; its kind decides its colour. */
export interface Line {
  name: string;
  kind: "first" | "second" | "third";
  value: (history: History) => number | undefined;
}

export interface Panel {
  title: string;
  format: (value: number) => string;
  /** Why there is nothing to draw where no value is known, and what changes that. */
  empty: string;
  /** Top of the chart, if it is known. */
  most?: number;
  /** Whether the server has what the panel is about; each has it if this is left out. */
  applies?: (history: History) => boolean;
  lines: Line[];
}

const decimal = (value: number): string =>
  value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const perSecond = (value: number): string => `${decimal(value)}/s`;
const percent = (value: number): string => `${decimal(100 * value)}%`;

function duration(seconds: number): string {
  return seconds < 1 ? `${decimal(1000 * seconds)} ms` : `${decimal(seconds)} s`;
}

function percentiles(metric: string): Line[] {
  return [
    { name: "median", kind: "first", value: (history) => history.percentile(metric, 0.5) },
    { name: "95%", kind: "second", value: (history) => history.percentile(metric, 0.95) },
  ];
}

/** Return a gauge as a share of another. */
function share(history: History, part: string, whole: string): number | undefined {
  const [some = 0, all] = [history.now(part), history.now(whole)];
  return all ? some / all : undefined;
}

/** Return whether the model is a hybrid. */
function hasStates(history: History): boolean {
  return (history.now("states") ?? 0) > 0;
}

/** A column of the table of tenants. */
export interface Column {
  title: string;
  format: (value: number) => string;
  value: (history: History) => number | undefined;
}

/** What is shown of each tenant where there are several. */
export const COLUMNS: readonly Column[] = [
  { title: "Running", format: count, value: (history) => history.now("num_requests_running") },
  { title: "Queued", format: count, value: (history) => history.now("num_requests_waiting") },
  { title: "Answers", format: perSecond, value: (history) => history.rate("request_success_total") },
  { title: "Prompt tokens", format: perSecond, value: (history) => history.rate("prompt_tokens_total") },
  {
    title: "From the cache",
    format: percent,
    value: (history) => history.ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
  },
  {
    title: "Generated tokens",
    format: perSecond,
    value: (history) => history.rate("generation_tokens_total"),
  },
  {
    title: "First token, median",
    format: duration,
    value: (history) => history.percentile("time_to_first_token_seconds", 0.5),
  },
  {
    title: "First token, 95%",
    format: duration,
    value: (history) => history.percentile("time_to_first_token_seconds", 0.95),
  },
];

export const PANELS: readonly Panel[] = [
  {
    title: "Answers",
    empty: "No rate yet: it takes two readings, two seconds apart.",
    format: perSecond,
    lines: [
      { name: "complete", kind: "first", value: (history) => history.rate("request_success_total") },
    ],
  },
  {
    title: "In progress",
    empty: "Not read yet.",
    format: count,
    lines: [
      { name: "running", kind: "first", value: (history) => history.now("num_requests_running") },
      { name: "queued", kind: "second", value: (history) => history.now("num_requests_waiting") },
      { name: "in idle time", kind: "third", value: (history) => history.now("num_requests_background") },
    ],
  },
  {
    title: "First token",
    empty: "No answer has begun in the time shown. The time to each answer's first token will be here.",
    format: duration,
    lines: percentiles("time_to_first_token_seconds"),
  },
  {
    title: "Gap between tokens",
    empty: "No answer of two tokens in the time shown. The time between tokens will be here.",
    format: duration,
    lines: percentiles("inter_token_latency_seconds"),
  },
  {
    title: "Prompt tokens from the cache",
    empty: "No prompt in the time shown. The share of each that was cached will be here.",
    format: percent,
    most: 1,
    lines: [
      {
        name: "found",
        kind: "first",
        value: (history) => history.ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
      },
    ],
  },
  {
    title: "KV slots",
    empty: "Not read yet.",
    format: percent,
    most: 1,
    lines: [
      {
        name: "cached",
        kind: "first",
        value: (history) => share(history, "kv_slots_cached", "kv_slots"),
      },
      {
        name: "in use",
        kind: "second",
        value: (history) => history.now("kv_cache_usage_perc"),
      },
    ],
  },
  {
    title: "States",
    empty: "Not read yet.",
    format: percent,
    most: 1,
    applies: hasStates,
    lines: [
      {
        name: "snapshots",
        kind: "first",
        value: (history) => share(history, "state_snapshots", "states"),
      },
      {
        name: "in use",
        kind: "second",
        value: (history) => share(history, "states_used", "states"),
      },
    ],
  },
  {
    title: "Snapshots of states",
    empty: "No rate yet: it takes two readings, two seconds apart.",
    format: perSecond,
    applies: hasStates,
    lines: [
      { name: "reused", kind: "first", value: (history) => history.rate("state_snapshots_reused_total") },
      { name: "evicted", kind: "second", value: (history) => history.rate("state_snapshots_evicted_total") },
    ],
  },
  {
    title: "Tokens",
    empty: "No rate yet: it takes two readings, two seconds apart.",
    format: perSecond,
    lines: [
      { name: "generated", kind: "first", value: (history) => history.rate("generation_tokens_total") },
      { name: "computed", kind: "second", value: (history) => history.rate("computed_tokens_total") },
    ],
  },
  {
    title: "Batch, tokens per step",
    empty: "The engine has run no step in the time shown. How many tokens its steps have will be here.",
    format: decimal,
    lines: [
      {
        name: "average",
        kind: "first",
        value: (history) => history.ratio("computed_tokens_total", "steps_total"),
      },
    ],
  },
  {
    title: "Engine",
    empty: "No rate yet: it takes two readings, two seconds apart.",
    format: percent,
    most: 1,
    lines: [
      { name: "busy", kind: "first", value: (history) => history.rate("busy_seconds_total") },
    ],
  },
];
