"use strict";
(() => {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "@3" and "@ink" stand for colours of the palette, which differ between a light and a dark page.
  const inTheme = (text) => {
    if (text === "@ink") return css("--ink");
    const entry = /^@(\d+)$/.exec(text);
    return entry ? css(`--c${entry[1]}`) : text;
  };
  const themed = (node, key) => {
    if (typeof node === "string") return key === "color" ? inTheme(node) : node;
    if (Array.isArray(node)) return node.map((item) => themed(item, key));
    if (node === null || typeof node !== "object") return node;
    const copy = {};
    for (const [name, value] of Object.entries(node)) copy[name] = themed(value, name);
    return copy;
  };

  const layoutOf = (chart) => {
    const layout = themed(chart.layout);
    const line = { gridcolor: css("--rule"), linecolor: css("--rule"), zerolinecolor: css("--muted") };
    layout.xaxis = { ...layout.xaxis, ...line };
    layout.yaxis = { ...layout.yaxis, ...line };
    layout.font = { color: css("--ink"), family: "system-ui, sans-serif", size: 13 };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: css("--page"), bordercolor: css("--rule"), font: { color: css("--ink") } };
    return layout;
  };
  const tracesOf = (chart) =>
    chart.traces.map((trace) => {
      const copy = themed(trace);
      copy.visible = !(trace.meta && hidden.has(trace.meta.row));
      return copy;
    });

  const draw = (chart) => {
    const place = document.getElementById(`chart-${chart.name}`);
    const options = { responsive: true, displaylogo: false, displayModeBar: false };
    return Plotly.react(place, tracesOf(chart), layoutOf(chart), options);
  };
  const drawAll = () => Promise.all(data.map(draw)).then(() => {
    document.documentElement.dataset.charts = "drawn";
  });

  for (const key of document.querySelectorAll("button.key")) {
    key.addEventListener("click", () => {
      const row = key.dataset.row;
      if (!hidden.delete(row)) hidden.add(row);
      for (const twin of document.querySelectorAll("button.key")) {
        if (twin.dataset.row === row) twin.setAttribute("aria-pressed", String(!hidden.has(row)));
      }
      drawAll();
    });
  }
  dark.addEventListener("change", drawAll);
  drawAll();
})();
