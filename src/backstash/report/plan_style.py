"""Style and script of a plan's page. The page is whole without the script, which sorts, searches and points."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--text:#1b1b1b;--soft:#5c6066;--ground:#fff;--card:#f5f6f8;--line:#d9dce1;--plain:#6b6b6b;
--budget:#c0392b;--rest:#b8bec6;--keep:#7d8894;--encode:#009e73;--recompute:#e69f00;--offload:#0072b2;--passing:#cc79a7}
@media(prefers-color-scheme:dark){:root{--text:#e8e8e8;--soft:#a3a8b0;--ground:#15171a;--card:#1f2226;--line:#363a41;
--plain:#c9c9c9;--budget:#ff7b6b;--rest:#4a505a;--keep:#76818e;--offload:#4aa3df}}
*{box-sizing:border-box}body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground)}
main{max-width:1240px;margin:0 auto;padding:24px 24px 60px}h1{font-size:24px;line-height:1.25;margin:0 0 6px}
h1,td,code{overflow-wrap:anywhere}h2{font-size:18px;margin:38px 0 4px}p{margin:0 0 10px}
.soft,.small{color:var(--soft)}.small{font-size:13px}code{font:.92em ui-monospace,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0 0;padding:0}
.tiles div{background:var(--card);border-radius:8px;padding:10px 14px}.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:22px;font-weight:600;line-height:1.3}.tiles dd small{display:block;font-size:13px;
font-weight:400;color:var(--soft)}
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
.tools{display:none;gap:12px;align-items:center;flex-wrap:wrap;margin:8px 0}.js .tools{display:flex}
.tools input{font:inherit;padding:6px 10px;width:min(380px,100%);color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{text-align:left;border-bottom:2px solid var(--line);padding:0 14px 0 0;white-space:nowrap;font-weight:600}
th button{all:unset;cursor:pointer;padding:5px 0}th button:focus-visible{outline:2px solid var(--offload)}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
td{border-bottom:1px solid var(--line);padding:5px 14px 5px 0;vertical-align:top}td.n,th.n{text-align:right}
td.name{font:12.5px/1.5 ui-monospace,monospace;min-width:290px}td.n{white-space:nowrap}
.chip{display:inline-block;white-space:nowrap;margin-right:10px}.chip i{display:inline-block;width:9px;height:9px;
border-radius:2px;margin-right:5px}summary{cursor:pointer}td ul{margin:4px 0;padding-left:18px}
td.name summary::marker{color:var(--soft)}.wide>summary{font-size:18px;font-weight:600;margin:38px 0 6px}
[hidden]{display:none!important}
@media(max-width:700px){main{padding:16px 14px 40px}.plot{height:240px}.chart{grid-template-columns:58px 1fr}
h1{font-size:20px}.tiles{grid-template-columns:1fr 1fr}.tiles dd{font-size:19px}
.cards,.cards tbody,.cards td{display:block}.cards thead{display:none}
.js .sortable thead{display:block}.js .sortable thead tr{display:flex;flex-wrap:wrap;gap:6px;margin-bottom:8px}
.sortable th{border:1px solid var(--line);border-radius:14px;padding:0 10px}.cards tbody tr{display:flex;
flex-wrap:wrap;gap:0 18px;padding:8px 0;border-bottom:1px solid var(--line)}.cards td{border:0;padding:1px 0;
text-align:left!important}.cards td[data-l]::before{content:attr(data-l) " ";color:var(--soft)}
.cards td.name{flex:0 0 100%;min-width:0;font-size:14px;font-weight:600}
.cards td.name ul{font-weight:400;font-size:13px}
.cards td:empty{display:none}.plot b{white-space:normal}}
"""

SCRIPT = """
document.documentElement.classList.add('js');
const points=JSON.parse(document.querySelector('#points').textContent);
for(const chart of document.querySelectorAll('.chart')){
 const plot=chart.querySelector('.plot'),tip=chart.querySelector('.tip'),cursor=chart.querySelector('.cursor');
 const found=points[chart.id];
 const show=event=>{
  const box=plot.getBoundingClientRect(),x=(event.clientX-box.left)/box.width;
  let best=found[0];
  for(const point of found)if(Math.abs(point[0]-x)<Math.abs(best[0]-x))best=point;
  cursor.style.left=tip.style.left=100*best[0]+'%';
  tip.classList.toggle('left',best[0]>.5);
  tip.textContent=best[1];chart.classList.add('on')};
 plot.addEventListener('pointermove',show);plot.addEventListener('pointerdown',show);
 plot.addEventListener('pointerleave',()=>chart.classList.remove('on'))}
for(const box of document.querySelectorAll('.tools')){
 const input=box.querySelector('input'),count=box.querySelector('output');
 const table=document.getElementById(input.dataset.table),body=table.tBodies[0];
 const search=()=>{
  const words=input.value.toLowerCase().split(/\\s+/);let shown=0;
  for(const row of body.rows){
   const text=row.textContent.toLowerCase();
   row.hidden=!words.every(word=>text.includes(word));shown+=!row.hidden}
  count.textContent=shown+' of '+body.rows.length};
 input.addEventListener('input',search);search();
 const heads=[...table.tHead.rows[0].cells],order=[...body.rows];
 heads.forEach((head,index)=>{
  const button=document.createElement('button');button.textContent=head.textContent;head.replaceChildren(button);
  button.addEventListener('click',()=>{
   const before=head.getAttribute('aria-sort'),first=head.classList.contains('n')?'descending':'ascending';
   const next=before===null?first:before===first?(first==='ascending'?'descending':'ascending'):null;
   heads.forEach(other=>other.removeAttribute('aria-sort'));
   if(next)head.setAttribute('aria-sort',next);
   const key=row=>{const cell=row.cells[index],v=cell.dataset.v;return v===undefined?cell.textContent:Number(v)};
   const sign=next==='descending'?-1:1;
   const rows=next?[...order].sort((a,b)=>{const x=key(a),y=key(b);return sign*(x<y?-1:x>y?1:0)}):order;
   body.append(...rows)})})}
"""
