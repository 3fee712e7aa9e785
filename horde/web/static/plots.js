// SPDX-License-Identifier: AGPL-3.0-or-later
// Lines over time, drawn by uPlot, with a legend of our own that says the newest figures as text.
import { formatFigure, make } from "./parts.js";

const HEIGHT = 160;
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });

// A canvas knows no style sheet: an element with the class is asked what the colour comes to.
function readColour(className) {
  const probe = make("span", { className });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function lastOf(values) {
  return values.findLast((value) => value !== null) ?? null;
}

// lines: [{name, label}], of the names of series. The figure is an element to put somewhere.
export function buildPlot({ title, lines }) {
  const box = make("div", { className: "plot" });
  const values = lines.map(() => make("strong", { text: "–" }));
  const items = lines.map((line, index) =>
    make("li", {}, make("span", { className: `swatch plot-${index}` }), `${line.label} `, values[index]),
  );
  const when = make("span", { className: "hint" });
  const caption = make("figcaption", {}, make("h3", { text: title }), when);
  const figure = make("figure", {}, caption, make("ul", { className: "legend" }, ...items), box);
  let plot = null;
  let data = null;

  function tell(index) {
    const at = index ?? data[0].length - 1;
    values.forEach((value, line) => {
      value.textContent = formatFigure(index === null ? lastOf(data[line + 1]) : data[line + 1][at]);
    });
    when.textContent = index === null ? "" : clock.format(data[0][at] * 1000);
  }

  function build() {
    if (!window.uPlot) { // it did not load: the figures are told all the same
      box.replaceChildren(make("p", { text: "The plot could not be loaded.", className: "hint" }));
      return;
    }
    plot?.destroy();
    const grid = { stroke: readColour("plot-grid"), width: 1 };
    const axis = { stroke: readColour("plot-text"), grid, ticks: { show: false }, font: "12px system-ui" };
    const options = {
      width: Math.max(200, box.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 1, 1) * 1.1] } },
      axes: [
        { ...axis, size: 28, space: 60, values: (_, seconds) => seconds.map((each) => clock.format(each * 1000)) },
        { ...axis, size: 52, space: 34, values: (_, all) => all.map(formatFigure) },
      ],
      series: [
        {},
        ...lines.map((line, index) => ({
          label: line.label,
          stroke: readColour(`plot-${index}`),
          width: 2,
          dash: index === 2 ? [6, 4] : undefined,
          points: { show: false },
          spanGaps: true,
        })),
      ],
      hooks: { setCursor: [(self) => tell(self.cursor.idx ?? null)] },
    };
    plot = new window.uPlot(options, data, box);
  }

  new ResizeObserver(() => plot?.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT })).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && build());

  function show(at, series) {
    data = [at, ...lines.map((line) => series[line.name])];
    if (plot) plot.setData(data);
    else build();
    tell(null);
  }

  return { figure, show };
}
