// Panels by the width of the screen, colours of the day and the night, legends that hide lines, and controls of curves.
"use strict";
const figures = [...document.querySelectorAll(".plotly-graph-div")];
const LEAST_WIDTH = 300;            // pixels of a panel
const BESIDE = 72, BELOW = 84;      // between panels: room for the labels of axes, and for titles

const axes = figure => Object.keys(figure.layout).filter(name => /^[xy]axis/.test(name) && figure._fullLayout[name]);

// A figure of several panels: as many in a row as have room.
function place(figure) {
  const {columns, panels, height, names_rows} = figure.layout.meta;
  const {l, r, t, b} = figure.layout.margin;
  if (figure.data[0]?.type === "heatmap") return fit(figure);
  if (panels < 2) return;
  const inRow = Math.max(1, Math.min(columns, Math.floor((figure.clientWidth - l - r + BESIDE) / (LEAST_WIDTH + BESIDE))));
  const rows = Math.ceil(panels / inRow), whole = height * rows;
  const wide = figure.clientWidth - l - r, high = whole - t - b;
  const x = (wide + BESIDE) / inRow, y = (high + BELOW) / rows;
  const change = {height: whole};
  for (let panel = 0; panel < panels; panel++) {
    const left = (panel % inRow) * x, top = Math.floor(panel / inRow) * y, name = panel ? panel + 1 : "";
    change[`xaxis${name}.domain`] = [left / wide, Math.min(1, (left + x - BESIDE) / wide)];
    change[`yaxis${name}.domain`] = [Math.max(0, 1 - (top + y - BELOW) / high), 1 - top / high];
    if (names_rows) change[`yaxis${name}.showticklabels`] = panel % inRow === 0;  // the panels beside it have the same rows
    change[`annotations[${panel}].x`] = (left + (x - BESIDE) / 2) / wide;
    change[`annotations[${panel}].y`] = 1 - top / high;
  }
  figure.style.height = figure.parentElement.style.height = `${whole}px`;
  Plotly.relayout(figure, change);
}

// The texts of a heat map's cells, where the longest has room: 7 pixels a letter.
function fit(figure) {
  const [{x, text, texttemplate}] = figure.data, longest = Math.max(...text.flat().map(each => each?.length || 0));
  figure.texttemplate ??= texttemplate;
  const hasRoom = figure._fullLayout._size.w / x.length > 7 * longest;
  Plotly.restyle(figure, {texttemplate: hasRoom ? figure.texttemplate : ""});
}

// The page's colours, which the night changes: of texts, grounds, lines between them, and what is drawn in black.
function paint(figure) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  figure.black ||= figure.data.map(trace => [trace.line?.color, trace.marker?.color].includes("#000000"));
  const isHeat = figure.data[0]?.type === "heatmap";
  const change = {"font.color": colour("--text"), paper_bgcolor: colour("--back"),
    plot_bgcolor: colour(isHeat ? "--thin" : "--back")};
  for (const axis of axes(figure)) {
    change[`${axis}.gridcolor`] = change[`${axis}.linecolor`] = colour("--thin");
    change[`${axis}.zerolinecolor`] = colour("--rule");
  }
  const black = figure.black.flatMap((isBlack, place) => isBlack ? [place] : []), ink = colour("--text");
  if (black.length) Plotly.restyle(figure, {"line.color": ink, "marker.color": ink, "error_x.color": ink}, black);
  Plotly.relayout(figure, change);
}

// TensorBoard's smoothing: a running mean that forgets, divided by the sum of its weights.
function smooth(values, weight) {
  let mean = 0, sum = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + 1 - weight;
    return mean / sum;
  });
}

// Every point of a curve has its step, samples and minutes; a mark of a resume has them in its name.
function draw(figure) {
  const over = +document.getElementById("over").value, weight = +document.getElementById("smoothing").value;
  const isLog = document.getElementById("log").checked, title = ["steps trained", "samples trained", "minutes"][over];
  figure.given ||= figure.data.map(trace => [...trace.y]);
  const curves = figure.data.map((trace, place) => [trace, place]).filter(([trace]) => trace.customdata?.length);
  const x = curves.map(([trace]) => trace.customdata.map(point => point[over]));
  const y = curves.map(([trace, place]) =>
    trace.mode.includes("lines") ? smooth(figure.given[place], weight) : figure.given[place]);
  const change = {};
  for (const name of axes(figure)) {
    if (name[0] === "x") change[`${name}.title.text`] = title;
    else change[`${name}.type`] = isLog ? "log" : "linear";
    change[`${name}.autorange`] = true;
  }
  (figure.layout.shapes || []).forEach((shape, place) => {
    if (shape.name) change[`shapes[${place}].x0`] = change[`shapes[${place}].x1`] = JSON.parse(shape.name)[over];
  });
  return Plotly.update(figure, {x, y}, change, curves.map(([, place]) => place));
}

for (const button of document.querySelectorAll(".legend button")) {
  const figure = button.closest(".figure").querySelector(".plotly-graph-div");
  button.addEventListener("click", () => {
    const isShown = button.getAttribute("aria-pressed") !== "true", name = button.dataset.name;
    const plain = text => new DOMParser().parseFromString(text || "", "text/html").body.textContent;
    const own = figure.data.flatMap((trace, place) =>
      [trace.name, trace.legendgroup].map(plain).includes(name) ? [place] : []);
    button.setAttribute("aria-pressed", isShown);
    Plotly.restyle(figure, {visible: isShown}, own);
  });
}
for (const id of ["over", "smoothing", "log"]) {
  document.getElementById(id)?.addEventListener("input", () =>
    document.querySelectorAll(".curves .plotly-graph-div").forEach(draw));
}
addEventListener("resize", () => figures.forEach(place));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach(paint));
figures.forEach(paint);
figures.forEach(place);
