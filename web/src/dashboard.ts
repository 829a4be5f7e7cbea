/**
 * The dashboard: draws the server's last half hour.
 *
 * What was before the page opened, or while it was hidden, the server has recorded itself; from
 * then on its metrics are read every other second.
 */

import { Chart, type Moment, SHOWN } from "./chart";
import { byId, count } from "./dom";
import { History } from "./history";
import { type Metrics, parseMetrics, tenants, total } from "./metrics";
import { PANELS } from "./panels";
import { readPast } from "./server_history";
import { tenantTable } from "./tenant_table";
import { themeSwitch } from "./theme";

const INTERVAL = 2000; // milliseconds
const SPAN = 30; // seconds that rates and percentiles are of
const MISSED = 15; // seconds without reading after which the server's record is read

let history = new History(SPAN);
let moments: Moment[] = [];
let read = -Infinity; // when metrics were read last
let pointed: number | undefined;
const charts = PANELS.map((panel, index) => new Chart(panel, index, (age) => {
  pointed = age;
  draw();
}));

const now = (): number => Date.now() / 1000; // goes on while the machine sleeps

function draw(): void {
  PANELS.forEach(({ applies }, index) => {
    const chart = charts[index]!;
    chart.element.hidden = applies !== undefined && !applies(history);
    if (!chart.element.hidden) chart.draw(moments, pointed);
  });
}

function add(time: number, metrics: Metrics): void {
  history.add(time, metrics);
  const values = PANELS.map(({ lines }) => lines.map(({ value }) => value(history)));
  moments.push({ time, values });
}

/** Take what the server has recorded in the place of what was seen here at the same time. */
async function catchUp(): Promise<void> {
  const past = await readPast(2 * INTERVAL);
  const time = now();
  history = new History(SPAN); // what comes next may be another process
  const oldest = past[0];
  if (oldest === undefined) return;
  moments = moments.filter((moment) => moment.time < time - oldest.age);
  for (const { age, metrics } of past) add(time - age, metrics);
}

function describe(metrics: Metrics): void {
  const [sample] = metrics.get("midfill:kv_slots") ?? [];
  byId("model").textContent = sample?.labels.get("model_name") ?? "";
  const prompts = total(metrics, "prefix_cache_queries_total");
  const found = total(metrics, "prefix_cache_hits_total");
  const facts = [
    `${count(total(metrics, "request_success_total"))} answers`,
    `${count(prompts)} prompt tokens` + (prompts ? `, ${count((100 * found) / prompts)}% cached` : ""),
    `${count(total(metrics, "generation_tokens_total"))} generated tokens`,
    `${count(total(metrics, "evicted_tokens_total"))} evicted`,
    `${count(total(metrics, "num_preemptions_total"))} preemptions`,
    `${count(total(metrics, "engine_restarts_total"))} restarts of the engine`,
  ];
  byId("facts").textContent = `Since the start: ${facts.join(" · ")}`;
}

async function readMetrics(): Promise<Metrics | undefined> {
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(2 * INTERVAL) } as const;
    const response = await fetch("metrics", options);
    return response.ok ? parseMetrics(await response.text()) : undefined;
  } catch {
    return undefined; // said by the notice: the server doesn't answer
  }
}

async function update(): Promise<void> {
  const metrics = await readMetrics();
  byId("notice").hidden = metrics !== undefined;
  if (metrics === undefined) {
    read = -Infinity;
    return;
  }
  if (now() - read > MISSED) await catchUp();
  read = now();
  add(read, metrics);
  moments = moments.filter(({ time }) => time >= read - SHOWN);
  describe(metrics);
  const names = tenants(metrics);
  byId("tenants").replaceChildren(...(names.length > 1 ? [tenantTable(history, names)] : []));
  draw();
}

async function run(): Promise<void> {
  if (!document.hidden) await update();
  window.setTimeout(() => void run(), INTERVAL);
}

byId("panels").append(...charts.map(({ element }) => element));
new ResizeObserver(draw).observe(byId("panels"));
themeSwitch(byId<HTMLButtonElement>("theme"));
void run();
