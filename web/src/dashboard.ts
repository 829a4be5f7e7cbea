/** The dashboard: reads the server's metrics every other second and draws the last minutes. */

import { byId, count, make, makeSvg } from "./dom";
import { History } from "./history";
import { type Metrics, parseMetrics, tenants, total } from "./metrics";
import { type Panel, PANELS } from "./panels";
import { tenantTable } from "./tenant_table";
import { themeSwitch } from "./theme";

const INTERVAL = 2000; // milliseconds
const SPAN = 30; // seconds that rates and percentiles are of
const POINTS = 150; // of each line: five minutes
const HEIGHT = 96;
const TOP = 14;

/** A panel on the page, with its lines' values so far. */
class Chart {
  readonly element: HTMLElement;
  private readonly values: (number | undefined)[][];
  private readonly legend = make("p", "legend");
  private readonly drawing = makeSvg("svg", { tabindex: 0, role: "img" });

  constructor(private readonly panel: Panel, onPoint: (place: number | undefined) => void) {
    this.values = panel.lines.map(() => []);
    this.element = make("section", "panel", make("h2", "", panel.title), this.legend, this.drawing);
    let place: number | undefined;
    const point = (to: number | undefined) => onPoint((place = to));
    this.drawing.addEventListener("pointermove", (event) => {
      point(Math.round((event.offsetX / this.drawing.clientWidth) * (POINTS - 1)));
    });
    for (const leaving of ["pointerleave", "blur"]) {
      this.drawing.addEventListener(leaving, () => point(undefined));
    }
    this.drawing.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      point(Math.min(Math.max((place ?? POINTS - 1) + step, 0), POINTS - 1));
    });
  }

  add(history: History | undefined): void {
    this.panel.lines.forEach((line, index) => {
      const values = this.values[index]!;
      values.push(history && line.value(history));
      if (values.length > POINTS) values.shift();
    });
  }

  /** Draw all lines; the legend shows the values at a place, or the last ones. */
  draw(place: number | undefined): void {
    const { lines, format } = this.panel;
    const known = this.values.flat().filter((value) => value !== undefined);
    const most = this.panel.most ?? niceTop(Math.max(...known, 0));
    const width = this.drawing.clientWidth;
    const shift = POINTS - this.values[0]!.length; // the newest value is at the right
    const x = (at: number) => (at / (POINTS - 1)) * width;
    const y = (value: number) => HEIGHT - (Math.min(value, most) / most) * (HEIGHT - TOP);
    const paths = lines.map(({ kind }, index) => {
      const d = pathOf(this.values[index]!, (at) => x(at + shift), y);
      return makeSvg("path", { class: kind, d });
    });
    const label = makeSvg("text", { x: 0, y: TOP - 4 });
    label.textContent = format(most);
    const axis = makeSvg("line", { x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT });
    const cross = place === undefined ? [] : [
      makeSvg("line", { class: "cross", x1: x(place), x2: x(place), y1: TOP, y2: HEIGHT }),
    ];
    this.drawing.replaceChildren(axis, label, ...paths.reverse(), ...cross);
    const entries = lines.map(({ name, kind }, index) => {
      const values = this.values[index]!;
      const value = values[(place ?? POINTS - 1) - shift];
      const shown = value === undefined ? "–" : format(value);
      return make("span", kind, make("b", "", shown), ` ${name}`);
    });
    this.legend.replaceChildren(...entries);
    const described = entries.map((entry) => entry.textContent).join(", ");
    this.drawing.setAttribute("aria-label", `${this.panel.title}: ${described}`);
  }
}

/** Return a line's path; it is interrupted where a value is not known. */
function pathOf(
  values: readonly (number | undefined)[], x: (at: number) => number, y: (value: number) => number,
): string {
  let pen = "M";
  return values.map((value, at) => {
    if (value === undefined) {
      pen = "M";
      return "";
    }
    const to = `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    // A value that stands alone would not be seen.
    const dot = pen === "M" && values[at + 1] === undefined ? "h2" : "";
    pen = "L";
    return to + dot;
  }).join("");
}

/** Return a round number that is at least as large. */
function niceTop(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 1;
}

let history = new History(SPAN);
let pointed: number | undefined;
const charts = PANELS.map((panel) => new Chart(panel, (place) => {
  pointed = place;
  draw();
}));

function draw(): void {
  for (const chart of charts) chart.draw(pointed);
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

async function read(): Promise<void> {
  let metrics: Metrics | undefined;
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(2 * INTERVAL) } as const;
    const response = await fetch("metrics", options);
    if (response.ok) metrics = parseMetrics(await response.text());
  } catch {
    // Said below: the server doesn't answer.
  }
  byId("notice").hidden = metrics !== undefined;
  if (metrics === undefined) {
    history = new History(SPAN); // what comes next may be another process
  } else {
    history.add(performance.now() / 1000, metrics);
    describe(metrics);
    const names = tenants(metrics);
    byId("tenants").replaceChildren(...(names.length > 1 ? [tenantTable(history, names)] : []));
  }
  for (const chart of charts) chart.add(metrics && history);
  draw();
}

async function run(): Promise<void> {
  if (!document.hidden) await read();
  window.setTimeout(() => void run(), INTERVAL);
}

byId("panels").append(...charts.map(({ element }) => element));
new ResizeObserver(draw).observe(byId("panels"));
themeSwitch(byId<HTMLButtonElement>("theme"));
void run();
