"use strict";

const element = (name) => document.getElementById(name);
const gauges = ["capacity", "free", "leased", "returning", "waiting"];
let chosen = null;
let renders = false;

// Rows and cells stay where they are, so that a click or the focus is not lost when numbers change.
function fill(table, rows) {
  const body = element(table).tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach(({ cells, mark }, index) => {
    const row = body.rows[index] || body.insertRow();
    row.className = mark ? "chosen" : "";
    cells.forEach((cell, place) => {
      const box = row.cells[place] || row.insertCell();
      if (cell instanceof Node) {
        if (!box.firstChild || !cell.isEqualNode(box.firstChild)) box.replaceChildren(cell);
      } else if (box.textContent !== String(cell)) box.textContent = cell;
    });
  });
}

function plot(name, seconds, lines) {
  const canvas = element(name), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.scale(scale, scale);
  const top = Math.max(1e-9, ...seconds.flatMap((each) => lines.map(({ column }) => each[column])));
  for (const { column, color } of lines) {
    pen.strokeStyle = style.getPropertyValue(color);
    pen.lineWidth = 1.5;
    pen.beginPath();
    seconds.forEach((each, index) => {
      const x = width - (seconds.length - 1 - index) * (width / 299);
      const y = height - 2 - (each[column] / top) * (height - 18);
      if (index) pen.lineTo(x, y); else pen.moveTo(x, y);
    });
    pen.stroke();
  }
  pen.fillStyle = getComputedStyle(document.body).color;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(top < 1e-6 ? "0" : top.toPrecision(3), 4, 12);
}

function choose(number) {
  chosen = chosen === number ? null : number;
  element("picture").hidden = true;
  showChosen(chosen !== null);
}

function showChosen(there) {
  element("chosen").hidden = !there;
  if (!there) { chosen = null; return; }
  element("chosen-name").textContent = `Session ${chosen}`;
  element("no-picture").hidden = renders;
  if (renders) draw(chosen);
}

async function draw(number) {
  const answer = await fetch(`sessions/${number}/picture`).catch(() => null);
  if (!answer || !answer.ok || number !== chosen) return;
  const picture = element("picture"), before = picture.src;
  picture.src = URL.createObjectURL(await answer.blob());
  picture.alt = `What session ${number} shows`;
  picture.hidden = false;
  if (before) URL.revokeObjectURL(before);
}

function show(now) {
  renders = now.renders;
  element("name").textContent = now.name;
  document.title = `${now.name}: aioenvs`;
  element("gauges").replaceChildren(...gauges.map((name) => {
    const box = document.createElement("div"), value = document.createElement("b");
    value.textContent = now.gauges[name];
    value.id = `gauge-${name}`;
    box.append(value, name);
    return box;
  }));
  const last = now.seconds.at(-1) || [0, 0, 0, 0];
  element("rate").textContent = last[1];
  element("p50").textContent = last[2];
  element("p99").textContent = last[3];
  plot("steps", now.seconds, [{ column: 1, color: "--strong" }]);
  plot("latency", now.seconds, [{ column: 3, color: "--soft" }, { column: 2, color: "--strong" }]);
  element("none").hidden = now.sessions.length > 0;
  fill("sessions", now.sessions.map((each) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = each.number;
    button.dataset.session = each.number;
    button.addEventListener("click", () => choose(each.number));
    const cells = [button, each.client, each.env, each.episodes, each.steps, each.episode_return, each.idle];
    return { cells, mark: each.number === chosen };
  }));
  fill("workers", now.workers.map((each) => ({
    cells: [each.pid ?? "", each.envs, each.memory === null ? "" : (each.memory / 1e6).toFixed(0),
      each.busy === null ? "" : `${Math.round(100 * each.busy)} %`, each.restarts],
  })));
  showChosen(chosen !== null && now.sessions.some((each) => each.number === chosen));
}

const source = new EventSource("live");
source.addEventListener("message", (event) => {
  element("status").textContent = "live";
  element("status").className = "";
  show(JSON.parse(event.data));
});
source.addEventListener("error", () => {
  element("status").textContent = "connection lost; trying again";
  element("status").className = "lost";
});
element("end").addEventListener("click", () => fetch(`sessions/${chosen}`, { method: "DELETE" }));
