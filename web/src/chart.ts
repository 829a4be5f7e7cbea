/** A panel on the page: its lines over the last half hour, and their values at one moment. */

import { count, make, makeSvg } from "./dom";
import type { Panel } from "./panels";

/** The values of all panels' lines at one moment; undefined where nothing was to be measured. */
export interface Moment {
  time: number; // seconds
  values: readonly (readonly (number | undefined)[])[];
}

export const SHOWN = 1800; // seconds at most

const MIN_SHOWN = 300; // of a server that has just started
const STEP = 10; // seconds that an arrow key goes
const MAX_GAP = 25; // seconds between moments that a line connects
const HEIGHT = 92;
const TOP = 14;
const AXIS = 108; // where the times are written

export class Chart {
  readonly element: HTMLElement;
  private readonly legend = make("p", "legend");
  private readonly drawing = makeSvg("svg", { tabindex: 0, role: "img" });
  private readonly empty: HTMLElement;
  private shown = MIN_SHOWN; // seconds

  /**
   * @param index the panel's place in the moments' values
   * @param onPoint called with the age in seconds that is pointed at; undefined if none is
   */
  constructor(
    private readonly panel: Panel,
    private readonly index: number,
    onPoint: (age: number | undefined) => void,
  ) {
    this.empty = make("p", "empty", panel.empty);
    const plot = make("div", "plot", this.drawing, this.empty);
    this.element = make("section", "panel", make("h2", "", panel.title), this.legend, plot);
    let age: number | undefined;
    const point = (to: number | undefined) => onPoint((age = to));
    this.drawing.addEventListener("pointermove", (event) => {
      point(this.shown * (1 - Math.min(Math.max(event.offsetX / this.drawing.clientWidth, 0), 1)));
    });
    for (const leaving of ["pointerleave", "blur"]) {
      this.drawing.addEventListener(leaving, () => point(undefined));
    }
    this.drawing.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: STEP, ArrowRight: -STEP, Home: SHOWN, End: -SHOWN }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      point(Math.min(Math.max((age ?? 0) + step, 0), this.shown));
    });
  }

  /** Draw all lines; the legend shows their values at an age, or the last ones. */
  draw(moments: readonly Moment[], age: number | undefined): void {
    const { lines, format } = this.panel;
    const newest = moments.at(-1);
    const own = (moment: Moment) => moment.values[this.index] ?? [];
    const known = moments.flatMap(own).filter((value) => value !== undefined);
    const most = this.panel.most ?? niceTop(max(known));
    const width = this.drawing.clientWidth;
    const end = newest?.time ?? 0;
    this.shown = Math.min(Math.max(end - (moments[0]?.time ?? end), MIN_SHOWN), SHOWN);
    const x = (time: number) => width * (1 - (end - time) / this.shown);
    const y = (value: number) => HEIGHT - (Math.min(value, most) / most) * (HEIGHT - TOP);
    const paths = lines.map(({ kind }, line) => {
      const points = moments.map((moment) => ({ time: moment.time, value: own(moment)[line] }));
      return makeSvg("path", { class: kind, d: pathOf(points, x, y) });
    });
    this.empty.hidden = known.length > 0 || newest === undefined;
    const axis = makeSvg("line", { x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT });
    const shown = age === undefined ? newest : nearest(moments, end - age);
    this.drawing.replaceChildren(
      axis,
      ...(known.length > 0 ? [label(format(most), 0, TOP - 4)] : []),
      ...(age === undefined ? times(width, this.shown) : cross(x(end - age), width, age)),
      ...paths.reverse(),
    );
    const entries = lines.map(({ name, kind }, line) => {
      const value = shown && own(shown)[line];
      return make("span", kind, make("b", "", value === undefined ? "–" : format(value)), ` ${name}`);
    });
    this.legend.replaceChildren(...entries);
    const described = entries.map((entry) => entry.textContent).join(", ");
    const when = age === undefined ? "" : `, ${agoOf(age)}`;
    const why = this.empty.hidden ? "" : `. ${this.panel.empty}`;
    this.drawing.setAttribute("aria-label", `${this.panel.title}${when}: ${described}${why}`);
  }
}

function max(values: readonly number[]): number {
  return values.reduce((most, value) => Math.max(most, value), 0);
}

/** Return the moment closest to a time, if a line would connect the two. */
function nearest(moments: readonly Moment[], time: number): Moment | undefined {
  const away = (moment: Moment) => Math.abs(moment.time - time);
  const [first, ...others] = moments;
  if (first === undefined) return undefined;
  const found = others.reduce((best, moment) => (away(moment) < away(best) ? moment : best), first);
  return away(found) < MAX_GAP ? found : undefined;
}

/** Return a line's path; it is interrupted where a value is not known. */
function pathOf(
  points: readonly { time: number; value: number | undefined }[],
  x: (time: number) => number,
  y: (value: number) => number,
): string {
  let before: number | undefined; // when the last value was known
  return points.map(({ time, value }, at) => {
    if (value === undefined) {
      before = undefined;
      return "";
    }
    const begins = before === undefined || time - before > MAX_GAP;
    before = time;
    const next = points[at + 1];
    const isAlone = begins && (next?.value === undefined || next.time - time > MAX_GAP);
    // A value that stands alone would not be seen.
    return `${begins ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${isAlone ? "h-2" : ""}`;
  }).join("");
}

/** Return a round number that is at least as large. */
function niceTop(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 1;
}

/** Return the times below the axis, of which the first is `shown` seconds ago. */
function times(width: number, shown: number): SVGElement[] {
  return [label(agoOf(shown), 0, AXIS), label("now", width, AXIS, "end")];
}

/** Return a line at an age, and the age below it. */
function cross(x: number, width: number, age: number): SVGElement[] {
  const margin = 50; // half of the widest text
  const line = makeSvg("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT });
  return [line, label(agoOf(age), Math.min(Math.max(x, margin), width - margin), AXIS, "middle")];
}

function agoOf(age: number): string {
  const seconds = Math.round(age / STEP) * STEP;
  if (seconds === 0) return "now";
  const minutes = Math.floor(seconds / 60);
  const parts = [minutes ? `${minutes} min` : "", seconds % 60 ? `${count(seconds % 60)} s` : ""];
  return `${parts.filter(Boolean).join(" ")} ago`;
}

function label(content: string, x: number, y: number, anchor = "start"): SVGElement {
  const element = makeSvg("text", { x, y, "text-anchor": anchor });
  element.textContent = content;
  return element;
}
