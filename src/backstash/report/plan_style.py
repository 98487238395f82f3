"""Style and script of a plan's charts, on top of what all pages share (stash/html.py)."""

from __future__ import annotations

from backstash.stash.html import PAGE_STYLE, TABLE_SCRIPT

STYLE = (
    PAGE_STYLE
    + """
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px;color:var(--soft);margin:6px 0 8px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.key.plain{height:0;border-top:3px solid var(--plain);border-radius:0;width:18px;vertical-align:4px}
.chart{display:grid;grid-template-columns:68px 1fr;font-size:12px;color:var(--soft)}
.plot{position:relative;height:320px;border-left:1px solid var(--line);border-bottom:1px solid var(--line);
touch-action:pan-y}.plot svg{position:absolute;inset:0;width:100%;height:100%}
.y,.x{position:relative}.x{grid-column:2;height:26px}.y span{position:absolute;right:8px;transform:translateY(50%);
white-space:nowrap}.x span{position:absolute;top:5px;transform:translateX(-50%);white-space:nowrap}
.plot>i,.plot>b{position:absolute;pointer-events:none}.grid{left:0;right:0;border-top:1px solid var(--line);opacity:.6}
.area{stroke:none}.line{fill:none;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.line.plain{stroke:var(--plain)}.line.planned{stroke:var(--text);stroke-width:1}.line.frontier{stroke:var(--rest)}
.dots{fill:none;stroke:var(--offload);stroke-width:5;stroke-linecap:round;vector-effect:non-scaling-stroke}
.dots.marked{stroke:var(--recompute);stroke-width:14}
.rest{fill:var(--rest);background:var(--rest)}.keep{fill:var(--keep);background:var(--keep)}
.encode{fill:var(--encode);background:var(--encode)}.recompute{fill:var(--recompute);background:var(--recompute)}
.offload{fill:var(--offload);background:var(--offload)}.passing{fill:var(--passing);background:var(--passing)}
i.edge{top:0;bottom:0;border-left:1px solid var(--text)}i.budget{left:0;right:0;border-top:2px dashed var(--budget)}
i.budget.upright{right:auto;top:0;bottom:0;border-top:0;border-left:2px dashed var(--budget)}
.plot b{font-size:13px;white-space:nowrap;color:var(--text);background:var(--ground);border-radius:4px;padding:0 5px;
opacity:.92}b.budget{left:6px;transform:translateY(-3px);color:var(--budget)!important;background:none!important;
text-shadow:0 0 3px
var(--ground),0 0 3px var(--ground)}
b.marked{margin:0 12px;transform:translateY(-8px)}
i.dot{width:9px;height:9px;border-radius:50%;transform:translate(-50%,50%);background:var(--text);
border:2px solid var(--ground)}i.dot.plain{background:var(--plain)}
.cursor,.tip{display:none}.on .cursor,.on .tip{display:block}.cursor{top:0;bottom:0;border-left:1px dotted var(--text)}
.tip{position:absolute;top:6px;white-space:pre-line;background:var(--card);color:var(--text);padding:5px 9px;
border:1px solid var(--line);border-radius:6px;margin-left:8px;pointer-events:none;max-width:60%;overflow-wrap:anywhere}
.tip.left{transform:translateX(calc(-100% - 16px))}
.at{margin:16px 0 4px}.stack{display:flex;height:22px;border-radius:4px;overflow:hidden;background:var(--card)}
@media(max-width:700px){.plot{height:240px}.chart{grid-template-columns:58px 1fr}.plot b{white-space:normal}}
"""
)

SCRIPT = (
    """
const points=JSON.parse(document.querySelector('#points').textContent);
for(const chart of document.querySelectorAll('.chart')){
 const plot=chart.querySelector('.plot'),tip=chart.querySelector('.tip'),cursor=chart.querySelector('.cursor');
 const found=points[chart.id];
 let best=found[0];
 const show=event=>{
  const box=plot.getBoundingClientRect(),x=(event.clientX-box.left)/box.width;
  for(const point of found)if(Math.abs(point[0]-x)<Math.abs(best[0]-x))best=point;
  mark()};
 const mark=()=>{
  cursor.style.left=tip.style.left=100*best[0]+'%';
  tip.classList.toggle('left',best[0]>.5);
  tip.textContent=best[1];chart.classList.add('on')};
 plot.addEventListener('pointermove',show);plot.addEventListener('pointerdown',show);
 plot.addEventListener('pointerleave',()=>chart.classList.remove('on'));
 plot.addEventListener('focus',mark);plot.addEventListener('blur',()=>chart.classList.remove('on'));
 plot.addEventListener('keydown',event=>{
  const at=found.indexOf(best),last=found.length-1;
  const next={ArrowLeft:at-1,ArrowRight:at+1,Home:0,End:last}[event.key];
  if(next===undefined)return;
  event.preventDefault();best=found[Math.max(0,Math.min(last,next))];mark()})}
"""
    + TABLE_SCRIPT
)
